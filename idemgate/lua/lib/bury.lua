--- @include "lib/digits"
--- @include "lib/letter_id"
--- @include "lib/weighed"
-- Moves a message to the dead letters. Call `discard` (lib/discard) once behind all of them.
local function bury(K, key, packed, reason, token, now_ms)
  local number = letter_id(K, token)
  local id = digits(number)
  redis.call("HSET", K.grave, id, weighed(K, cmsgpack.pack({ key, packed, reason, now_ms, number })))
  redis.call("ZADD", K.dead, now_ms, id)
end
