-- Schedule a pending message. A message behind a delivery of the same key is in no set: settling that delivery
-- schedules it.
local function schedule(K, key, m)
  if redis.call("HEXISTS", K.inflight, key) == 0 then
    redis.call("ZADD", K.scheduled, m.due, key)
  end
end
