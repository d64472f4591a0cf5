--- @include "lib/digits"
-- Restart leases and the rate limit from now, because the clock jumped back: tokens follow the clock, and the last one
-- is ahead of it. Tokens of one batch run ahead of the clock by microseconds.
local function restart_times(K, now_us, want, rate)
  local lease_end, most = digits(math.floor(now_us / 1000) + want.lease), now_us + want.interval * want.burst
  for _, key in ipairs(redis.call("ZRANGEBYSCORE", K.leases, "(" .. lease_end, "+inf", "LIMIT", 0, 1000)) do
    redis.call("ZREM", K.leases, key)
    redis.call("ZADD", K.leases, lease_end, key)
  end
  if rate > most then
    redis.call("HSET", K.meta, "rate", digits(most))
  end
  return math.min(rate, most)
end
