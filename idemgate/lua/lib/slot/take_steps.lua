--- @include "lib/digits"
--- @include "lib/slot/header"
--- @include "lib/slot/inflight"
--- @include "lib/schedule/next_due"
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
    redis.call("HSET", K.meta, "rate", digits(most))
  end
  return math.min(rate, most)
end

-- Return the next due messages: their keys, their due times, and their members in the set that holds them.
local function next_due_messages(K, ranked, now_ms, most)
  local found, dues = {}, {}
  if ranked then
    local members = redis.call("ZRANGE", K.ready, 0, most - 1)
    for i, member in ipairs(members) do
      found[i], dues[i] = string.sub(member, 16), tonumber(string.sub(member, 1, 15))
    end
    return found, dues, members
  end
  local scored = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
  for i = 1, #scored, 2 do
    local n = (i + 1) / 2
    found[n], dues[n] = scored[i], tonumber(scored[i + 1])
  end
  return found, dues, found
end

-- Return the deliveries of an earlier take that it still owns.
local function replay_take(K, known, now_ms)
  local token, reply = digits(known[3]), { "ok", now_ms, next_due(K, now_ms, 0), known[2], 0 }
  for _, key in ipairs(known[1]) do
    local entry, packed = redis.call("HGET", K.inflight, key), redis.call("HGET", K.messages, key)
    local d, flags, _, due = entry and parse_entry(entry), read_header(packed)
    if d and flags and d.token == token then
      local n = #reply
      reply[5], reply[n + 1], reply[n + 2], reply[n + 3] = known[3], key, d.due or due, packed
    end
  end
  return reply
end
