--- @include "lib/slot/message"
-- Schedule a pending message. A message behind a delivery of the same key is in no set: settling that delivery
-- schedules it.
local function schedule(K, key, m)
  if redis.call("HEXISTS", K.flight, key) == 0 then
    redis.call("ZADD", K.due, m[message.due], key)
  end
end
