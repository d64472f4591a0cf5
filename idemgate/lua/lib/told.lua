-- The reply that was given to this request, or nil. Replies are remembered for 30 to 60 s, longer than any retry.
-- A request that is part of a larger one, which was asked of a slot that has moved, says so: behind its own id (16 bytes) come theirs,
-- and then this is the reply to the larger one.
local function told(K, request, now_ms)
  local half = math.floor(now_ms / 30000)
  for at = 1, math.max(#request, 1), 16 do
    for back = 0, 1 do
      local found = redis.call("HMGET", K.told[(half - back) % 2], "", string.sub(request, at, at + 15))
      if found[2] and tonumber(found[1]) == half - back then
        local whole, reply = pcall(cmsgpack.unpack, found[2])
        if whole and type(reply) == "table" and #reply > 1 then
          return reply
        end
        return { "foreign", now_ms, K.told[(half - back) % 2] .. " holds what is no reply of ours" }
      end
    end
  end
end
