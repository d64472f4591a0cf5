--- Cancel the pending message of a key, or move it to the dead letters. A delivery in flight may still run. It is not retried if
--- the key is cancelled, and goes on as before if the message is buried.
--- KEYS[1..15] slot
--- KEYS[16..17] results (topics/lib/slot/store_result), only if the topic stores them
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] key
--- ARGV[5] name of the process
--- ARGV[6] failure of the dead letter, only if the message is to be buried
--- Returns {"cancelled", now ms} {"buried", now ms} (no delivery of the message starts after this) {"in_flight", now ms} (to bury:
---         no message is pending) {"absent", now ms} {"foreign", now ms, problem}
--- Keys: hash
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/slot/inflight"
--- @include "topics/lib/slot/read_entries"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/slot/reopen_window"
--- @include "topics/lib/slot/store_result"
--- @include "topics/lib/schedule/hints"
--- @include "topics/lib/slot/history"
local K, p, key, failure = slot(KEYS), policy(ARGV[3]), ARGV[4], ARGV[6]
K.results = p.results and { [0] = KEYS[16], [1] = KEYS[17] }
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms, p, key)
if known_reply then
  return known_reply
end
local token
if failure then
  --- @include "lib/fence"
  token = fence(redis.call("HGET", K.meta, "fence"), now_us)
  local problem = corrupt_number(K.meta, "fence", token)
  if problem then
    return { "foreign", now_ms, problem }
  end
end
-- Start with HDEL: a server without memory refuses a script whose first write may allocate.
redis.call("HDEL", K.meta, "")
local d, running = read_entries(K, { key })[key], nil
local hash = d and K.next or K.messages
local packed = redis.call("HGET", hash, key)
if not packed and (failure or not d) then
  return remember_reply(K, ARGV[2], now_ms, { d and "in_flight" or "absent", now_ms })
end
if d then
  d, running = parse_entry(d), decode_message(redis.call("HGET", K.messages, key))
end
if packed then
  local m, before = decode_message(packed), earliest_due(K)
  if failure then
    -- What stores the letter: an ACL denial must end the script before it removes the message.
    redis.call("HEXISTS", K.dead_data, "")
    redis.call("HSET", K.meta, "fence", digits(token))
  end
  local stood = unschedule(K, key, m) -- fault: cancel-scheduled
  redis.call("HDEL", hash, key)
  if failure then
    --- @include "topics/lib/dead_letters"
    if stood and stood ~= m.due then
      m.due, m.why = stood, reason.flush
    end
    add_dead_letter(K, key, m, failure, token, now_ms) -- fault: buried-key
    discard_dead_letters(K, p, now_ms)
  end
  reopen_window(K, p, key)
  if not d then
    group_leave(K, m.group, key, p.group_limit)
    publish_hint(K, before, earliest_due(K))
  end
  add_counters(K, failure and { buried = 1, buried_triggers = m.count } or { cancelled = 1, cancelled_triggers = m.count })
  store_result(K, p, key, m, failure and "d" .. failure or "c", now_ms, running and running.serial)
  note_transition(K, failure and "buried" or "cancelled", key, nil, m)
end
if d and not failure then -- fault: bury-running
  redis.call("HSET", K.inflight, key, format_entry(d.token, d.due or running.due, true, running.count, running.group)) -- fault: cancel-running
  note_transition(K, "cancel_asked", key, d.token, running)
end
write_history(K, p, ARGV[5], now_ms)
return remember_reply(K, ARGV[2], now_ms, { failure and "buried" or d and "in_flight" or "cancelled", now_ms })
