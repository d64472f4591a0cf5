--- Remove dead letters: redrive them (pending again, attempts reset, due now), or delete them for good. A letter whose
--- version is lower than that of a later trigger of its key is deleted in either case. A letter stays if the pending message of
--- its key would lose items by it.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] "redrive" | "delete"
--- ARGV[5] maximum number of letters, oldest first, if no id is given
--- ARGV[6] name of the process
--- ARGV[7] number of the oldest letters to skip, if no id is given
--- ARGV[8..] ids; a call handles 128 KiB of letters or a single one, and as many bytes of messages to merge with
--- Returns {"ok", now ms, letters removed, letters left, ids handled, letters deleted as outdated, letters handled that stay}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "topics/lib/schedule/requeue"
--- @include "topics/lib/schedule/fits_pending"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/schedule/hints"
--- @include "topics/lib/slot/budget"
--- @include "topics/lib/slot/require_storing"
--- @include "topics/lib/trigger/is_outdated"
--- @include "topics/lib/slot/history"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end
local problem
local ids = { unpack(ARGV, 8) }
if #ids == 0 then
  ids = redis.call("ZRANGE", K.dead, ARGV[7], ARGV[7] + ARGV[5] - 1)
end
local accepted, keys = count_within_budget(K, p, ids, max_call_bytes, "dead_data"), {}
for i = 1, accepted do
  local id = ids[i]
  local packed = redis.call("HGET", K.dead_data, id)
  local letter = packed and unpack_table(packed)
  if packed and not (letter and type(letter[1]) == "string" and validate_message(letter[2], p.merge)) then
    return { "foreign", now_ms, corrupt_entry(K.dead_data, id) }
  end
  keys[i] = letter and letter[1] or ""
end
accepted = count_within_budget(K, p, keys, max_call_bytes, "messages", "next")
for i = 1, accepted do
  problem = keys[i] ~= "" and validate_keys(K, p, { keys[i] })
  if problem then
    return { "foreign", now_ms, problem }
  end
end
if ARGV[4] == "redrive" and accepted > 0 then
  require_storing(K)
else
  -- Start with HDEL: a server without memory refuses a script whose first write may allocate.
  redis.call("HDEL", K.meta, "")
end
local before, taken, triggers, folded, outdated, old_triggers, stay = earliest_due(K), 0, 0, 0, 0, 0, 0
for i = 1, accepted do
  local id = ids[i]
  local letter = redis.call("HGET", K.dead_data, id)
  letter = letter and cmsgpack.unpack(letter)
  local m = letter and decode_message(letter[2])
  local old = m and ARGV[4] == "redrive" and is_outdated(K, letter[1], m.version, now_ms)
  if m and ARGV[4] == "redrive" and not old and not fits_pending(K, p, letter[1], m) then
    stay = stay + 1
  elseif m then
    redis.call("ZREM", K.dead, id)
    redis.call("HDEL", K.dead_data, id) -- fault: letter-gone
    taken, triggers = taken + 1, triggers + m.count
    if old then
      outdated, old_triggers = outdated + 1, old_triggers + m.count
      note_transition(K, "outdated", letter[1], nil, m)
    elseif ARGV[4] == "redrive" then
      note_transition(K, "redriven", letter[1], nil, m)
      m.attempts, m.pinned = 0, 0 -- fault: redriven
      m.earlier = ""
      folded = folded + requeue(K, p, letter[1], m, now_ms, reason.redrive)
    else
      note_transition(K, "deleted", letter[1], nil, m)
    end
  end
end
if taken > 0 and ARGV[4] == "redrive" then
  add_counters(K, {
    redriven = taken - outdated, redriven_triggers = triggers - old_triggers, folded = folded, outdated = outdated,
    deleted = outdated, deleted_triggers = old_triggers,
  })
  publish_hint(K, before, earliest_due(K))
elseif taken > 0 then
  add_counters(K, { deleted = taken, deleted_triggers = triggers }) -- fault: deleted-count
end
write_history(K, p, ARGV[6], now_ms)
return remember_reply(K, ARGV[2], now_ms, { "ok", now_ms, taken, redis.call("ZCARD", K.dead), accepted, outdated, stay })
