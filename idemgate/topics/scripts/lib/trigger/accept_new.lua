--- @include "topics/lib/slot/add_entries"
--- @include "topics/lib/schedule/due_times"
-- Accept triggers of different keys that have no messages, the path of most calls. They have no options but times,
-- and most calls have one time. So the messages differ only in the accumulators. Return the reply. Return nil if a
-- key has a message: then nothing was written, and `t.stored` holds the messages. `t.args` are the arguments of the
-- script, because a copy of them takes time: `t.given` keys from the 7th on, then as many accumulators.
local function accept_new(t)
  local K, p, now_ms, n, given, args = t.K, t.p, t.now_ms, t.n, t.given, t.args
  t.stored = redis.call("HMGET", K.messages, unpack(args, 7, 6 + n))
  for i = 1, n do
    if t.stored[i] then
      return nil
    end
  end
  local serial, times, time, reply, last = t.last_serial + n, t.times, t.options, { "ok", now_ms }, 2
  local entries, scheduled, large, earliest, earliest_score = {}, {}, false, math.huge, nil
  local prefix, due, score
  for i = 1, n do
    if not prefix or times and times[i] ~= time then
      time = times and times[i] or time
      prefix, due, score = prepare_new(p, parse_time(time, now_ms), serial, now_ms)
      if due < earliest then
        earliest, earliest_score = due, score
      end
      reply[last + 1], reply[last + 2], last = 8 * (due - now_ms), 0, last + 2
    end
    reply[last] = reply[last] + 1
    local key, m = args[6 + i], prefix .. args[6 + given + i]
    entries[2 * i - 1], entries[2 * i] = key, m
    scheduled[2 * i - 1], scheduled[2 * i] = score, key
    large = large or #m > 1024
  end
  local is_earliest = redis.call("ZCOUNT", K.scheduled, "-inf", earliest_score) == 0
  -- @allow HDEL PEXPIRE UNLINK ZADD ZRANGEBYSCORE ZREM ZSCORE
  -- The first write is one that is refused when the server is out of memory: all or nothing.
  redis.call("HSET", K.meta, "v", "2", "accepted", digits(serial))
  if large then -- see track_large
    redis.call("HSET", K.meta, "large", "1")
  end
  add_entries(K.messages, entries, 2 * n, K.scheduled, scheduled, 2 * n)
  if is_earliest then
    redis.pcall("PUBLISH", K.scheduled, earliest_score)
  end
  return reply
end
