--- Make dead letters of another topic pending messages of this one, each once: a mark of each is remembered for a day or
--- `remember`. A message keeps its due time, attempts and version. It merges with the pending message of its key, and is then
--- due at the earlier time of both, unless a caller set one. It stays a letter if that message would lose items by it.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] name of the process
--- ARGV[5..] two a letter: mark (topics/lib/events); packed dead letter (topics/lib/slot/slot)
--- Returns {"ok", now ms, then one a letter: "scheduled" | "merged" | "duplicate" (its mark is known) | "dropped" (a later trigger
---         of its key has a higher version) | "full" (there is no room for both) | "left" (this call has read 128 KiB of messages)} {"foreign", now ms, problem}
--- Keys: hash
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "topics/lib/schedule/requeue"
--- @include "topics/lib/schedule/fits_pending"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/schedule/hints"
--- @include "topics/lib/slot/budget"
--- @include "topics/lib/trigger/is_outdated"
--- @include "topics/lib/events"
--- @include "topics/lib/slot/history"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end
local DAY = 86400000
local seen, marks, keys, messages, problem = load_events(K), {}, {}, {}, nil
for i = 5, #ARGV, 2 do
  local mark, letter = ARGV[i], unpack_table(ARGV[i + 1])
  if not (letter and type(letter[1]) == "string" and validate_message(letter[2], p.merge)) then
    return { "foreign", now_ms, corrupt_entry("argument", i + 1) }
  end
  marks[#marks + 1], keys[#keys + 1], messages[#messages + 1] = mark, letter[1], decode_message(letter[2])
end
local accepted = count_within_budget(K, p, keys, max_call_bytes, "messages", "next")
for i = 1, accepted do
  problem = problem or validate_keys(K, p, { keys[i] }) or validate_group(K, messages[i].group, p.group_limit)
  if not problem and not check_bucket(seen, bucket_of(seen, marks[i])) then
    problem = seen.problem
  end
end
local serial = count_of(redis.call("HGET", K.meta, "accepted"))
if problem then
  return { "foreign", now_ms, problem }
end
-- The first write is one that is refused as a whole when the server is out of memory.
redis.call("HSET", K.meta, "v", "3", "accepted", digits(serial))
local before, reply, triggers, folded, dropped, expires = earliest_due(K), { "ok", now_ms }, 0, 0, 0, now_ms + math.max(p.remember, DAY)

-- Return the time of a message and its reason: the time of the pending message of its key, if that is earlier.
local function earlier_time(key, m)
  local hash = pending_hash(K, key)
  local packed = m.pinned == 0 and redis.call("HGET", hash, key)
  if not packed then
    return m.due, m.why
  end
  local waiting, stood = decode_message(packed), hash == K.messages and redis.call("ZSCORE", K.scheduled, key)
  local due = tonumber(stood) or waiting.due
  if due >= m.due then
    return m.due, m.why
  end
  return due, due == waiting.due and waiting.why or reason.flush
end

local function store_version(key, m)
  if m.version ~= "" then
    redis.call("HSET", K.dedup, "v" .. key, m.group == "" and m.version or m.version .. " " .. m.group)
    redis.call("ZADD", K.dedup_expiry, now_ms + p.remember, "v" .. key)
  end
end

local function adopt(key, m)
  if is_outdated(K, key, m.version, now_ms) then
    dropped = dropped + m.count
    note_transition(K, "dropped_version", key, nil, m)
    return "dropped"
  end
  m.serial = serial + triggers + m.count
  if not fits_pending(K, p, key, m) then
    return "full"
  end
  triggers = triggers + m.count
  local due, why = earlier_time(key, m)
  local joined = requeue(K, p, key, m, due, why)
  folded = folded + joined
  store_version(key, m)
  local answer = joined == 1 and "merged" or "scheduled"
  if p.history then
    note_transition(K, answer, key, nil, m)
  end
  return answer
end

for i, key in ipairs(keys) do
  local answer = "left"
  if i <= accepted and has_event(seen, marks[i], now_ms) then
    answer = "duplicate"
  elseif i <= accepted then
    answer = adopt(key, messages[i])
    if answer ~= "full" then
      add_event(seen, marks[i], expires, now_ms)
    end
  end
  reply[i + 2] = answer
end
store_events(seen)
extend_lifetime(K, expires - now_ms, true)
add_counters(K, { accepted = triggers, folded = folded, dropped = dropped, dropped_version = dropped })
publish_hint(K, before, earliest_due(K))
write_history(K, p, ARGV[4], now_ms)
return remember_reply(K, ARGV[2], now_ms, reply)
