--- @include "lib/message"
-- Schedules a pending message. Behind a delivery of its own key it stands nowhere: ending the delivery schedules it.
local function place(K, key, m)
  if redis.call("HEXISTS", K.flight, key) == 0 then
    redis.call("ZADD", K.due, m[message.due], key)
  end
end
