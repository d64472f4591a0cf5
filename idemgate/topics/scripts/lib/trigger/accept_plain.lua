--- Makes a part of the reply.
--- @include "lib/now"
--- @include "topics/lib/slot/header"
--- @include "topics/lib/slot/add_entries"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/schedule/due_times"
--- @include "topics/lib/trigger/read_stored"
--- @include "topics/lib/payloads"
--- @include "topics/lib/validate/stored"
-- Merge a trigger into a packed message. Return the message, and its new and its former due time. Return nil if the
-- message needs `accept_any`. Such a message is corrupt, is full, or has an extension. Or it waits for a retry. Or its time was
-- set by the caller or by a flush of the slot (`flushed`: its last serial). If the policy computes, the message is
-- only a header, and `plan.sums` has its unpacked accumulator.
local function merge_packed(t, plan, key, packed, acc)
  if #packed < HEADER_SIZE then
    return nil
  end
  local p, now_ms = t.p, t.now_ms
  local flags, why, count, first, last, old_due, serial = struct.unpack(HEADER, packed)
  if flags ~= 0 or why == reason.retry or why > reason.redrive or serial <= plan.flushed then
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
  end
  local stored = plan.sums[key] or unpack_table(string.sub(packed, HEADER_SIZE + 1))
  if not stored or not plan.sums[key] and not is_accumulator(p.merge, stored) then
    return nil
  end
  local merged, lost = merge(p.merge, stored, cmsgpack.unpack(acc))
  if lost and lost > 0 then
    return nil -- the trigger may be dropped
  end
  plan.sums[key] = merged
  return header, due, old_due
end

-- Plan the triggers `t`: which keys get which messages and due times. Write nothing. Return nil if a message or the
-- topic needs `accept_any`. In the plan `words` holds keys and messages in turn. `scheduled` holds due times and
-- keys. `sums` holds the unpacked accumulators of messages that are only a header in `words`. `codes` holds the codes
-- of the reply.
local function plan_plain(t)
  local K, p, now_ms, n = t.K, t.p, t.now_ms, t.n
  if p.ranked or redis.call("EXISTS", K.ready) == 1 then
    return nil
  end
  read_stored(t)
  local counters = redis.call("HMGET", K.meta, "merged", "flushed")
  local plan = {
    serial = t.last_serial + n, flushed = tonumber(counters[2]) or 0, before = count_of(counters[1]), merged = 0,
    sums = {},
    words = {}, size = 0, scheduled = {}, moved = 0, codes = {}, earliest = math.huge, large = false,
  }
  local words, places, stored, in_flight, scheduled = plan.words, {}, t.stored, t.in_flight, plan.scheduled
  local times, time, prefix, new_due, new_score = t.times, t.options, nil, nil, nil
  for i = 1, n do
    local key, acc = t.names[i], t.accs[i]
    if not prefix or times and times[i] ~= time then
      time = times and times[i] or time
      prefix, new_due, new_score = prepare_new(p, parse_time(time, now_ms), plan.serial, now_ms)
    end
    local place, m, due, score, old_due = places[key], nil, new_due, new_score, nil
    local old = place and words[place] or stored[i]
    if not old then
      m, plan.codes[i] = prefix .. acc, 8 * (due - now_ms)
    elseif time ~= "" then
      return nil
    else
      m, due, old_due = merge_packed(t, plan, key, old, acc)
      if not m then
        return nil
      end
      plan.merged, score, plan.codes[i] = plan.merged + 1, due ~= old_due and due, 8 * (due - now_ms) + 1
    end
    if not place then
      place, plan.size = plan.size + 2, plan.size + 2
      words[place - 1], places[key] = key, place
    end
    words[place], plan.large = m, plan.large or #m > 1024
    if score and not in_flight[key] then -- fault: in-flight
      scheduled[plan.moved + 1], scheduled[plan.moved + 2] = score, key
      plan.moved, plan.earliest = plan.moved + 2, due < plan.earliest and due or plan.earliest
    end
  end
  for key, acc in pairs(plan.sums) do
    local m = words[places[key]] .. cmsgpack.pack(acc)
    words[places[key]], plan.large = m, plan.large or #m > 1024
  end
  return plan
end

-- Accept triggers by the headers of messages alone. Return the reply. Return nil if any of the triggers needs
-- `accept_any`: then nothing was written.
local function accept_plain(t)
  local plan, K = plan_plain(t), t.K
  if not plan then
    return nil
  end
  local words, size, nexts, is_earliest = plan.words, plan.size, {}, false
  if plan.moved > 0 then
    is_earliest = redis.call("ZCOUNT", K.scheduled, "-inf", digits(plan.earliest)) == 0
  end
  if next(t.in_flight) then
    words, size = {}, 0 -- only those whose keys are not in flight
    for i = 1, plan.size, 2 do
      local key, m = plan.words[i], plan.words[i + 1]
      if t.in_flight[key] then
        nexts[#nexts + 1], nexts[#nexts + 2] = key, m
      else
        words[size + 1], words[size + 2], size = key, m, size + 2
      end
    end
  end
  -- @allow HDEL PEXPIRE UNLINK ZADD ZRANGEBYSCORE ZREM ZSCORE
  -- The first write is one that is refused when the server is out of memory: all or nothing.
  redis.call("HSET", K.meta, "v", "2", "accepted", digits(plan.serial))
  if plan.merged > 0 then
    redis.call("HSET", K.meta, "merged", digits(plan.before + plan.merged))
  end
  if plan.large then -- see track_large
    redis.call("HSET", K.meta, "large", "1")
  end
  add_entries(K.messages, words, size, K.scheduled, plan.scheduled, plan.moved)
  if #nexts > 0 then
    redis.call("HSET", K.next, unpack(nexts))
  end
  if is_earliest then
    redis.pcall("PUBLISH", K.scheduled, digits(plan.earliest))
  end
  return reply_of(t, plan.codes)
end
