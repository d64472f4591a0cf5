--- @include "lib/digits"
--- @include "lib/slot/header"
--- @include "lib/slot/add_entries"
--- @include "lib/schedule/due_times"
local PACKED_OPTIONS = 149 -- the first byte of packed options (lib/trigger/accept_any): an array of five
-- Read the messages behind deliveries in flight into `stored`, by index. Return the set of keys in flight.
local function read_behind(K, names, stored)
  local in_flight, behind, at = {}, {}, {}
  for i, entry in ipairs(redis.call("HMGET", K.inflight, unpack(names))) do
    if entry then
      in_flight[names[i]], stored[i] = true, false
      behind[#behind + 1], at[#at + 1] = names[i], i
    end
  end
  for n, packed in ipairs(#behind > 0 and redis.call("HMGET", K.next, unpack(behind)) or {}) do
    stored[at[n]] = packed
  end
  return in_flight
end

-- Return the packed pending messages of these keys, by index, and the set of keys in flight. The pending message of a key in
-- flight is the one behind its delivery.
local function read_stored(K, names)
  local stored = redis.call("HMGET", K.messages, unpack(names))
  return stored, redis.call("HLEN", K.inflight) > 0 and read_behind(K, names, stored) or {}
end

-- Return what new messages with these options share: all bytes but the accumulator, the due time as number and as text.
-- `serial` is that of the last trigger of the call, because a key has one new message in a call.
local function prepare_new(p, options, serial, now_ms)
  local at, due, why = parse_time(options, now_ms), nil, nil
  if at then
    due, why = at, reason.time
  else
    due, why = due_by_policy(p, nil, nil, now_ms, 1, now_ms)
  end
  return struct.pack(HEADER, at and 1 or 0, why, 1, now_ms, now_ms, due, serial), due, digits(due)
end

-- Merge a trigger into a packed message. Return the message, and its new and its former due time. Return nil if the message
-- needs `accept_any`. Such a message is corrupt or has an extension. Or it waits for a retry. Or its time was set by the caller
-- or by a flush of the slot (`flushed`: its last serial). If the policy computes, the message is only a header, and `plan.sums` has its unpacked
-- accumulator. The functions for that are created once per call, and only then.
local function merge_packed(t, plan, key, packed, acc)
  if #packed < HEADER_SIZE then
    return nil
  end
  local p, now_ms = t.p, t.now_ms
  local flags, why, count, first, last, old_due, serial = struct.unpack(HEADER, packed)
  if flags ~= 0 or why == reason.retry or why > reason.redrive or serial <= t.flushed then
    return nil
  end
  local due = old_due
  count, first, last = count + 1, first < now_ms and first or now_ms, last > now_ms and last or now_ms
  if p.quiet or p.max_size then
    due, why = due_by_policy(p, due, why, first, count, now_ms)
  end
  local header = struct.pack(HEADER, 0, why, count, first, last, due, plan.serial)
  if p.merge.op == "last" then
    return header .. acc, due, old_due
  elseif p.merge.op == "first" then
    return header .. string.sub(packed, HEADER_SIZE + 1), due, old_due
  elseif not plan.merge then
    --- @include "lib/merge/payloads"
    --- @include "lib/validate/stored"
    plan.merge, plan.unpack = merge, function(text)
      local stored = unpack_table(text)
      return stored and is_accumulator(p.merge, stored) and stored or nil
    end
  end
  local stored = plan.sums[key] or plan.unpack(string.sub(packed, HEADER_SIZE + 1))
  if not stored then
    return nil
  end
  plan.sums[key] = plan.merge(p.merge, stored, cmsgpack.unpack(acc))
  return header, due, old_due
end

-- Plan the triggers `t`: which keys get which messages and due times. Write nothing. Return nil if a trigger has options
-- beyond a time, or if a message or the topic needs `accept_any`. In the plan `words` holds keys and messages in turn.
-- `scheduled` holds due times and keys. `sums` holds the unpacked accumulators of messages that are only a header in `words`.
-- `same` is the reply of all triggers if they have the same.
local function plan_plain(t)
  local K, p, now_ms, names, texts, accs = t.K, t.p, t.now_ms, t.names, t.texts, t.accs
  if p.leading then
    return nil
  end
  local stored, in_flight = read_stored(K, names)
  local plan = { serial = t.last_serial + #names, sums = {}, in_flight = next(in_flight) and in_flight, merged = 0 }
  local words, size, places, scheduled, moved, reply = {}, 0, {}, {}, 0, { "ok", now_ms }
  local options, prefix, new_due, new_score, code, long
  local earliest = math.huge
  for n = 1, #names do
    local key, place, due, score, m = names[n], nil, new_due, new_score, nil
    if texts[n] then
      plan.same = options == nil
      options = texts[n]
      if string.byte(options) == PACKED_OPTIONS then
        return nil
      end
      prefix, new_due, new_score = prepare_new(p, options, plan.serial, now_ms)
      due, score, code = new_due, new_score, 8 * (new_due - now_ms)
    end
    place = places[key]
    local old = place and words[place] or stored[n]
    if not place then
      place, size = size + 2, size + 2
      words[place - 1], places[key] = key, place
    end
    if not old then
      m, reply[n + 2] = prefix .. accs[n], code
    elseif options ~= "" or plan.merged == 0 and (p.ranked or redis.call("EXISTS", K.ready) == 1) then
      return nil
    else
      local old_due
      m, due, old_due = merge_packed(t, plan, key, old, accs[n])
      if not m then
        return nil
      end
      plan.merged, score, reply[n + 2] = plan.merged + 1, due ~= old_due and due, 8 * (due - now_ms) + 1
    end
    words[place] = m
    if #m > 1024 then
      long = true
    end
    if score and not in_flight[key] then
      scheduled[moved + 1], scheduled[moved + 2] = score, key
      moved = moved + 2
      if due < earliest then
        earliest = due
      end
    end
  end
  for key, acc in pairs(plan.sums) do
    local m = words[places[key]] .. cmsgpack.pack(acc)
    words[places[key]], long = m, long or #m > 1024
  end
  plan.words, plan.size, plan.scheduled, plan.moved, plan.reply = words, size, scheduled, moved, reply
  plan.earliest, plan.long = earliest, long
  plan.same = plan.same and plan.merged == 0 and { "ok", now_ms, { code, #names } } or nil
  return plan
end

-- Accept triggers by the headers of messages alone, the path of most calls. Return the reply, and its short form (see
-- remember_reply) or nil. Return nil if any of the triggers needs `accept_any`. Then nothing was written.
local function accept_plain(t)
  local plan, K = plan_plain(t), t.K
  if not plan then
    return nil
  end
  local words, size, behind, hint = plan.words, plan.size, {}, false
  if plan.moved > 0 then
    hint = redis.call("ZCOUNT", K.scheduled, "-inf", digits(plan.earliest)) == 0
  end
  if plan.in_flight then
    words, size = {}, 0 -- only those that are not behind a delivery
    for i = 1, plan.size, 2 do
      local key, m = plan.words[i], plan.words[i + 1]
      if plan.in_flight[key] then
        behind[#behind + 1], behind[#behind + 2] = key, m
      else
        words[size + 1], words[size + 2], size = key, m, size + 2
      end
    end
  end
  -- The first write is one that is refused when the server is out of memory: all or nothing.
  local counts = { "v", "2", "accepted", digits(t.last_serial + #t.names) }
  if plan.merged > 0 then
    counts[5], counts[6] = "merged", digits(t.merged + plan.merged)
  end
  if plan.long then -- see track_large
    counts[#counts + 1], counts[#counts + 2] = "large", "1"
  end
  redis.call("HSET", K.meta, unpack(counts))
  add_entries(K.messages, words, size, K.scheduled, plan.scheduled, plan.moved)
  if #behind > 0 then
    redis.call("HSET", K.next, unpack(behind))
  end
  if hint then
    redis.pcall("PUBLISH", K.scheduled, digits(plan.earliest))
  end
  return plan.reply, plan.same
end
