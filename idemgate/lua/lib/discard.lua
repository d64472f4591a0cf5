--- @include "lib/count"
--- @include "lib/message"
--- @include "lib/sound"
--- @include "lib/portion"
-- Discards and counts dead letters past retention or beyond the cap, at most 100 a call, and of the large ones fewer.
local function discard(K, p, now_ms)
  local old = redis.call("ZRANGEBYSCORE", K.dead, "-inf", now_ms - p.retention, "LIMIT", 0, 100)
  local beyond = redis.call("ZCARD", K.dead) - p.max_dead
  if #old == 0 and beyond > 0 then
    old = redis.call("ZRANGE", K.dead, 0, math.min(beyond, 100) - 1)
  end
  if #old == 0 then
    return
  end
  old = { unpack(old, 1, portion(K, p, old, most_bytes, "grave")) }
  local triggers = 0
  for _, packed in ipairs(redis.call("HMGET", K.grave, unpack(old))) do
    -- One that cannot be read goes as well: it is too old, and would never be less so.
    local found = unpacked(packed)
    local m = found and sound_message(found[2])
    triggers = triggers + (m and m[message.count] or 0)
  end
  redis.call("HDEL", K.grave, unpack(old))
  redis.call("ZREM", K.dead, unpack(old))
  count(K, { expired = #old, expired_triggers = triggers })
end
