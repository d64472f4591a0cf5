-- The reply that was given to this request, or nil. Replies are remembered for 30 to 60 s, longer than any retry.
-- A request that is part of a larger one, which was asked of a slot that has moved, says so: behind its own id (16 bytes) come theirs,
-- and then this is the reply to the larger one.
-- Of an id the last 14 bytes are kept (8 of them random, 6 a counter), of the reply its time is counted from the beginning of its half
-- minute: either takes 16 bytes instead of 32, with what it replied.
local function told(K, request, now_ms)
  local half = math.floor(now_ms / 30000)
  for at = 1, math.max(#request, 1), 16 do
    for back = 0, 1 do
      local target = K.told[(half - back) % 2]
      local found = redis.call("HMGET", target, "", string.sub(request, at + 2, at + 15))
      if found[2] and tonumber(found[1]) == half - back then
        local whole, reply = pcall(cmsgpack.unpack, found[2])
        if whole and type(reply) == "table" and type(reply[2]) == "number" then
          reply[2] = type(reply[1]) == "string" and (half - back) * 30000 + reply[2] or reply[2]
          return reply
        end
        return { "foreign", now_ms, target .. " holds what is no reply of ours" }
      end
    end
  end
end
