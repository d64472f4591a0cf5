--- @include "lib/digits"
-- Moves a message to the dead letters. Call `discard` (lib/discard) once behind all of them.
local function bury(K, key, packed, reason, fence_number, now_ms)
  local id = digits(fence_number)
  redis.call("HSET", K.grave, id, cmsgpack.pack({ key, packed, reason, now_ms, fence_number }))
  redis.call("ZADD", K.dead, now_ms, id)
end
