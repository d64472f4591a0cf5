--- @include "lib/message"
-- Schedules what waited behind a delivery that has just ended.
local function promote(K, key)
  local waiting = redis.call("HGET", K.pending, key)
  if waiting then
    redis.call("ZADD", K.due, cmsgpack.unpack(waiting)[message.due], key)
  end
end
