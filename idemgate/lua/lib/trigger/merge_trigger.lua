--- @include "lib/digits"
--- @include "lib/slot/header"
--- @include "lib/slot/message"
--- @include "lib/trigger/read_stored"
--- @include "lib/slot/counters"
--- @include "lib/validate/slot"
--- @include "lib/validate/problems"
--- @include "lib/validate/stored"
--- @include "lib/trigger/dedup"
--- @include "lib/merge/payloads"
--- @include "lib/schedule/due_times"
--- @include "lib/schedule/schedule"
--- @include "lib/group/group"
-- The state of a call that accepts triggers with options. By key it holds:
--   pending    the message: packed, and decoded once a trigger merges into it
--   in_flight  true while a delivery of the key is in flight
--   scores     the scheduled time; false if the key is not scheduled, nil if unknown
--   changed    true if the message has to be written
-- `scheduled` collects due times and keys.
local function new_call(K, p, now_ms)
  return { K = K, p = p, now_ms = now_ms, pending = {}, scores = {}, changed = {}, scheduled = {} }
end

-- Read the packed pending messages of these keys and their scheduled times.
local function read_pending(call, t, names)
  local existing = {}
  read_stored(t)
  call.in_flight = t.in_flight
  for i, key in ipairs(names) do
    call.pending[key] = t.stored[i] or nil
    if t.stored[i] and not call.in_flight[key] then
      existing[#existing + 1] = key
    end
  end
  for i, score in ipairs(#existing > 0 and redis.call("ZMSCORE", call.K.scheduled, unpack(existing)) or {}) do
    call.scores[existing[i]] = tonumber(score) or false
  end
end

local function add_scheduled(call, key, due, score)
  local scheduled = call.scheduled
  scheduled[#scheduled + 1], scheduled[#scheduled + 2] = score, key
  call.scores[key] = due
end
local function write_scheduled(call)
  if #call.scheduled > 0 then
    redis.call("ZADD", call.K.scheduled, unpack(call.scheduled))
    call.scheduled = {}
  end
end

local function write_pending(call)
  local words, behind = {}, {}
  for key in pairs(call.changed) do
    local target = call.in_flight[key] and behind or words
    local m = call.pending[key]
    target[#target + 1], target[#target + 2] = key, track_large(call.K, type(m) == "table" and encode_message(m) or m)
  end
  if #words > 0 then
    redis.call("HSET", call.K.messages, unpack(words))
  end
  if #behind > 0 then
    redis.call("HSET", call.K.next, unpack(behind))
  end
  write_scheduled(call)
end

-- Decode the pending messages. Return a problem with what the triggers touch, or nil.
local function validate_touched(call, names, all_options)
  local K, p = call.K, call.p
  local problem = validate_slot(K)
  for n, key in ipairs(problem and {} or names) do
    local options, m = all_options[n], call.pending[key]
    if type(m) == "string" and p.raw and string.byte(m) ~= 2 and string.byte(m) ~= 3 then
      problem = not read_header(m) and corrupt_entry(call.in_flight[key] and K.next or K.messages, key) -- nothing else to decode
    elseif type(m) == "string" then
      m = validate_message(m, p.merge)
      call.pending[key] = m
      problem = not m and corrupt_entry(call.in_flight[key] and K.next or K.messages, key)
        or validate_group(K, m.group, p.group_limit)
    end
    problem = problem or m and options.group ~= "" and validate_group(K, options.group, p.group_limit) or options.tracked and validate_dedup(call, key, options)
    if problem then
      return problem
    end
  end
  return problem
end

-- Write the scheduled times collected so far: group changes happen in the store. The cached times are dropped.
local function flush_scheduled(call)
  write_scheduled(call)
  call.scores = {}
end
local function scheduled_at(call, key)
  if call.in_flight[key] then
    return false
  elseif call.scores[key] == nil then
    write_scheduled(call)
    call.scores[key] = tonumber(redis.call("ZSCORE", call.K.scheduled, key)) or false
  end
  return call.scores[key]
end

-- Move a changed pending message to the set where it now belongs. If the caller set another time between two
-- attempts, the message leaves its group. `old` holds the fields that say where it was.
local function reschedule_merged(call, key, old, score, m, at)
  local K, limit = call.K, call.p.group_limit
  local priority_changed, group_changed = old.priority ~= m.priority, old.group ~= m.group
  if score then
    if m.due ~= score then
      add_scheduled(call, key, m.due, digits(m.due))
    end
  elseif old.due ~= m.due or priority_changed or group_changed then
    flush_scheduled(call)
    if unschedule(K, key, old) then
      schedule(K, key, m)
    end
  end
  local later = at or m.due > (score or old.due) or group_changed
  if old.group == "" or not (later or priority_changed) or call.in_flight[key] then
    return
  end
  flush_scheduled(call)
  if later then
    group_leave(K, old.group, key, limit)
  else
    -- The message may have been the next of its group and is no longer.
    group_promote(K, m.group, limit)
  end
end

-- Merge one trigger into the pending message of its key. Return its receipt and the due time.
local function merge_trigger(call, key, old, options, acc, serial)
  local p, now_ms = call.p, call.now_ms
  call.changed[key] = true
  -- The scheduled time, or false: behind a delivery of its key or group, or already ready.
  local score = scheduled_at(call, key)
  local old_place = { due = old.due, priority = old.priority, group = old.group, rank = old.rank }
  local receipt = "merged"
  local m = merge_messages(p.merge, old, {
    count = 1, first = now_ms, last = now_ms, serial = serial, acc = acc, version = options.version,
    priority = options.priority, group = options.group,
  })
  if score and score ~= m.due then
    m.due, m.why = score, reason.flush
  end
  if options.at then
    receipt = "replaced"
    m.due, m.why, m.pinned = options.at, reason.time, 1
  elseif m.pinned == 0 and m.attempts == 0 and m.why ~= reason.retry then
    -- The policy moves neither a time set by the caller nor a retry's time.
    m.due, m.why = due_by_policy(p, m.due, m.why, m.first, m.count, now_ms)
  end
  reschedule_merged(call, key, old_place, score, m, options.at)
  return receipt, m.due
end
