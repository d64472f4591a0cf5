-- The reply that was given to this request, or nil. Replies are remembered for 30 to 60 s, longer than any retry.
local function told(K, request, now_ms)
  local half = math.floor(now_ms / 30000)
  for back = 0, 1 do
    local found = redis.call("HMGET", K.told[(half - back) % 2], "", request)
    if found[2] and tonumber(found[1]) == half - back then
      return cmsgpack.unpack(found[2])
    end
  end
end
