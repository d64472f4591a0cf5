--- @include "lib/count"
--- @include "lib/digits"
--- @include "lib/letter_id"
--- @include "lib/message"
--- @include "lib/sound"
-- Moves a message to the dead letters, and discards and counts those past retention (at most 100 a call) or beyond the cap.
local function bury(K, p, key, packed, reason, token, now_ms)
  local number = letter_id(K, token)
  local id = digits(number)
  redis.call("HSET", K.grave, id, cmsgpack.pack({ key, packed, reason, now_ms, number }))
  redis.call("ZADD", K.dead, now_ms, id)
  local old = redis.call("ZRANGEBYSCORE", K.dead, "-inf", now_ms - p.retention, "LIMIT", 0, 100)
  local beyond = redis.call("ZCARD", K.dead) - p.max_dead
  if #old == 0 and beyond > 0 then
    old = redis.call("ZRANGE", K.dead, 0, math.min(beyond, 100) - 1)
  end
  local triggers = 0
  for _, letter in ipairs(old) do
    -- One that cannot be read goes as well: it is too old, and would never be less so.
    local found = unpacked(redis.call("HGET", K.grave, letter))
    local m = found and sound_message(found[2])
    triggers = triggers + (m and m[message.count] or 0)
    redis.call("HDEL", K.grave, letter)
    redis.call("ZREM", K.dead, letter)
  end
  count(K, { expired = #old, expired_triggers = triggers })
end
