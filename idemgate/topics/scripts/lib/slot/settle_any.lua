--- Makes a part of the reply.
--- @include "topics/lib/slot/header"
--- @include "topics/lib/dead_letters"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/slot/budget"
--- @include "topics/lib/slot/read_entries"
--- @include "topics/lib/slot/remove_acked"
--- @include "topics/lib/slot/require_storing"
--- @include "topics/lib/schedule/requeue"
--- @include "topics/lib/slot/store_result"
--- @include "topics/lib/slot/history"
-- Keep only the failed items in a message. `packed` is {failure, number of failed items, their accumulator}. An
-- appended item is one trigger, so the triggers of the other items are done. The triggers behind union items or
-- fields are unknown, so all of them stay counted. Return the failure, the number of items, and the number of
-- triggers done.
local function apply_partial(p, m, packed)
  local failure, items, acc = unpack(cmsgpack.unpack(packed))
  local triggers = p.merge.op == "append" and items or m.count
  local done = m.count - triggers
  m.acc, m.count, m.splits = acc, triggers, m.splits + 1
  return failure, items, done
end

-- Settle a delivery in another way than a plain ack, and count it with `add_count`. Return its outcome. For the verb "result",
-- an ack of which the result is stored, `failure` is the result.
local function settle_one(K, p, key, d, verb, delay, failure, now_ms, add_count)
  local m = delivered_message(K, key, d)
  local function note_ending(what)
    if p.history then
      note_transition(K, what, key, d.token, m)
    end
  end
  end_delivery(K, key)
  if verb == "part" then
    local items, triggers
    failure, items, triggers = apply_partial(p, m, failure)
    add_count("partial", 1)
    add_count("items_failed", items)
    add_count("acked_triggers", triggers)
  end
  if verb == "result" then
    store_result(K, p, key, m, failure, now_ms)
    add_count("acked", 1)
    add_count("acked_triggers", m.count)
    note_ending("acked")
    finish_delivery(K, p, key, m.group)
    return "ok"
  elseif d.cancelled and verb ~= "bury" then -- fault: settle-cancelled
    store_result(K, p, key, m, "c", now_ms)
    note_transition(K, "cancelled", key, d.token, m)
    add_count("cancelled", 1)
    add_count("cancelled_triggers", m.count)
    finish_delivery(K, p, key, m.group, true)
    return "cancelled"
  elseif verb == "return" then -- fault: given-back
    add_count("returned", 1)
    note_ending("returned")
    add_count("folded", requeue(K, p, key, m, m.due, m.why))
    return "ok"
  elseif verb == "defer" then
    add_count("deferred", 1)
    note_ending("deferred")
    m.pinned = 0 -- fault: put-off
    add_count("folded", requeue(K, p, key, m, now_ms + delay, reason.retry))
    return "ok"
  end
  m.attempts = m.attempts + 1 -- fault: attempt-counted
  add_count("nacked", verb == "bury" and 0 or 1)
  if verb == "bury" or is_exhausted(p, m) then -- fault: buried
    add_count("buried", 1)
    add_count("buried_triggers", m.count)
    add_dead_letter(K, key, m, failure, tonumber(d.token), now_ms)
    store_result(K, p, key, m, "d" .. failure, now_ms)
    note_transition(K, "buried", key, d.token, m)
    finish_delivery(K, p, key, m.group, true)
    return "dead"
  end
  note_ending("nacked")
  m.failure, m.pinned = failure, 0
  lower_priority(p, m)
  add_count("folded", requeue(K, p, key, m, now_ms + delay, reason.retry))
  return "ok"
end

-- Read the entries of deliveries and the messages behind them. Return three tables by key: the entries; those that an ack
-- needs, or another verb, parsed; the packed messages behind. On a problem return nil and the problem.
local function read_deliveries(K, p, keys, tokens, others)
  local live, parsed, behind = read_entries(K, keys, tokens), {}, {}
  for i, key in ipairs(keys) do
    local entry = live[key]
    if entry and (entry ~= tokens[i] or others[i]) then
      local d = parse_entry(entry)
      local problem = not d and corrupt_entry(K.inflight, key)
      if not problem and d.group ~= "" then
        problem = validate_group(K, d.group, p.group_limit)
      end
      problem = problem or others[i] and validate_keys(K, p, { key }, live)
      if problem then
        return nil, problem
      end
      parsed[key] = d
    end
  end
  for i, packed in ipairs(redis.call("HMGET", K.next, unpack(keys))) do
    if packed then
      if not read_header(packed) then
        return nil, corrupt_entry(K.next, keys[i])
      end
      behind[keys[i]] = packed
    end
  end
  return live, parsed, behind
end

-- Settle deliveries of any kind, as `settle_deliveries` does.
local function settle_any(K, p, keys, tokens, others, now_ms, request)
  local problem = validate_slot(K)
  if problem then
    return nil, problem
  end
  local accepted = count_within_budget(K, p, keys, max_call_bytes, "next", next(others) and "messages")
  local live, parsed, behind = {}, {}, {}
  if accepted > 0 then
    live, parsed, behind = read_deliveries(K, p, { unpack(keys, 1, accepted) }, tokens, others)
    if not live then
      return nil, parsed
    end
  end
  -- @allow *
  -- Run a command of later steps now: an ACL denial must end this before its first write.
  redis.call("HSTRLEN", K.meta, "")

  local reply, acked, next_messages, grouped, done, triggers, ends = {}, {}, {}, {}, {}, 0, 0
  local function add_count(name, n)
    done[name] = (done[name] or 0) + n
  end
  if next(others) then
    require_storing(K)
  else
    -- Start with a deletion: a server without memory refuses a script whose first write is any that may allocate.
    redis.call("HDEL", K.meta, "")
  end
  for i, key in ipairs(keys) do
    local entry, d, other = live[key], parsed[key], others[i]
    if i > accepted then
      reply[i] = "left"
    elseif not entry or (d and d.token or entry) ~= tokens[i] then -- fault: settle-token
      reply[i] = "lost"
      add_count("lost", 1)
      note_transition(K, "lost", key, tokens[i])
    else
      live[key] = false -- a delivery is settled at most once per call
      if other then
        reply[i] = settle_one(K, p, key, d, other[1], other[2], other[3], now_ms, add_count)
      else
        reply[i] = "ok"
        ends, triggers = ends + 1, triggers + (d and d.count or 1)
        acked[ends], next_messages[key] = key, behind[key]
        if p.history then
          note_transition(K, "acked", key, tokens[i])
        end
        if d and d.group ~= "" then
          grouped[#grouped + 1] = { d.group, key }
        end
      end
    end
  end
  if #acked > 0 then
    remove_acked(K, acked, next_messages, true)
    for _, one in ipairs(grouped) do
      group_leave(K, one[1], one[2], p.group_limit) -- fault: settle-group
    end
    add_count("acked", #acked)
    add_count("acked_triggers", triggers)
  end
  if done.buried then
    discard_dead_letters(K, p, now_ms)
  end
  add_counters(K, done)
  write_history(K, p, string.sub(request, 1, 8), now_ms)
  return reply, true
end
