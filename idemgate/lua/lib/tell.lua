-- Remembers the reply of a request (lib/told), so that a copy of the request gets the same answer and has no second effect.
-- Call it after the first write that may be refused for want of memory.
local function tell(K, request, now_ms, reply)
  local half = math.floor(now_ms / 30000)
  local told = K.told[half % 2]
  local period = redis.call("HGET", told, "")
  if tonumber(period) ~= half then
    redis.call("DEL", told)
    redis.call("HSET", told, "", string.format("%.0f", half))
    redis.call("PEXPIRE", told, 120000)
  end
  local timed = type(reply[1]) == "string" -- a word and the time; what `take` keeps of its own is not
  reply[2] = timed and now_ms - half * 30000 or reply[2]
  redis.call("HSET", told, string.sub(request, 3, 16), cmsgpack.pack(reply))
  reply[2] = timed and now_ms or reply[2]
  return reply
end
