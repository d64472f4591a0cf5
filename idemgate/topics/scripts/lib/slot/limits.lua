--- @include "lib/now"
-- Return how many messages may be delivered, and when the slot opens again: 0 = open now, a time in ms, or nil = when a
-- delivery ends. The rate is a generic cell rate algorithm (GCRA): the theoretical arrival time may run ahead of the
-- clock by at most the burst.
local function count_permitted(K, want, wanted, paused, rate, now_us)
  if paused then
    return 0, nil
  end
  if want.flights > 0 then
    local room = want.flights - redis.call("HLEN", K.inflight)
    if room <= 0 then
      return 0, nil
    end
    wanted = math.min(wanted, room)
  end
  if want.interval > 0 then
    local ahead, burst = math.max(rate, now_us), want.burst * want.interval
    local room = math.max(0, math.floor((now_us + burst - ahead) / want.interval))
    if room < wanted then
      return room, math.ceil((ahead + want.interval * (room + 1) - burst) / 1000)
    end
  end
  return wanted, 0
end

-- Restart leases and the rate limit from now, because the clock jumped back: tokens follow the clock, and the last one
-- is ahead of it. Tokens of one batch run ahead of the clock by microseconds.
local function restart_times(K, now_us, want, rate)
  local lease_end, most = digits(math.floor(now_us / 1000) + want.lease), now_us + want.interval * want.burst
  for _, key in ipairs(redis.call("ZRANGEBYSCORE", K.leases, "(" .. lease_end, "+inf", "LIMIT", 0, 1000)) do
    redis.call("ZREM", K.leases, key)
    redis.call("ZADD", K.leases, lease_end, key)
  end
  if rate > most then
    redis.call("HDEL", K.meta, "") -- a server without memory refuses a script whose first write may allocate
    redis.call("HSET", K.meta, "rate", digits(most))
  end
  return math.min(rate, most)
end
