--- Set another due time for the pending message of a key.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] key
--- ARGV[5] due time: "a" + ms since the epoch, "d" + ms from now
--- Returns {"rescheduled", now ms, due ms} {"in_flight", now ms, 0} (no message is pending) {"absent", now ms, 0}
---         {"foreign", now ms, problem}
--- Keys: hash
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/schedule/due_times"
--- @include "topics/lib/schedule/hints"
--- @include "topics/lib/slot/history"
local K, p, key = slot(KEYS), policy(ARGV[3]), ARGV[4]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms, p, key)
if known_reply then
  return known_reply
end
-- Start with HDEL: a server without memory refuses a script whose first write may allocate.
redis.call("HDEL", K.meta, "")
local hash = pending_hash(K, key)
local packed, in_flight = redis.call("HGET", hash, key), hash == K.next
if not packed then
  return remember_reply(K, ARGV[2], now_ms, { in_flight and "in_flight" or "absent", now_ms, 0 })
end
local m, due, before = decode_message(packed), parse_time(ARGV[5], now_ms), earliest_due(K)
local stood = unschedule(K, key, m)
m.due, m.why, m.pinned = due, reason.time, 1 -- fault: reschedule-time
redis.call("HSET", hash, key, encode_message(m))
if stood then -- fault: reschedule-passed
  schedule(K, key, m)
  group_leave(K, m.group, key, p.group_limit)
  publish_hint(K, before, earliest_due(K))
end
if p.history then
  note_transition(K, "rescheduled", key, nil, m)
  write_history(K, p, string.sub(ARGV[2], 1, 8), now_ms)
end
return remember_reply(K, ARGV[2], now_ms, { "rescheduled", now_ms, due })
