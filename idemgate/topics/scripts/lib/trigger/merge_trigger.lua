--- Makes a part of the reply.
--- @include "lib/now"
--- @include "topics/lib/slot/header"
--- @include "topics/lib/payloads"
--- @include "topics/lib/schedule/due_times"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/trigger/pending"
--- @include "topics/lib/validate/slot"
--- @include "lib/problems"
--- @include "topics/lib/validate/stored"
-- Decode the pending messages that the triggers merge into. Return a problem with them, their groups or the slot, or nil.
local function validate_merges(call, names, all_options)
  local K, p = call.K, call.p
  local problem = validate_slot(K)
  for n, key in ipairs(problem and {} or names) do
    local options, m = all_options[n], call.pending[key]
    local target = call.in_flight[key] and K.next or K.messages
    local flags = type(m) == "string" and read_header(m)
    if type(m) == "string" and p.raw and not (flags and flags > 1) then
      problem = not flags and corrupt_entry(target, key) -- nothing else to decode
    elseif type(m) == "string" then
      m = validate_message(m, p.merge)
      call.pending[key] = m
      problem = not m and corrupt_entry(target, key) or validate_group(K, m.group, p.group_limit)
    end
    problem = problem or m and options.group ~= "" and validate_group(K, options.group, p.group_limit)
    if problem then
      return problem
    end
  end
  return problem
end

local no_group = { group = "" }
-- Move a changed pending message to the set where it now belongs. If the caller set another time between two
-- attempts, the message leaves its group. `old` holds the fields that say where it was. It is `no_group` for a
-- scheduled message if neither the message nor its trigger has a group.
local function reschedule_merged(call, key, old, score, m, at)
  local K, limit = call.K, call.p.group_limit
  if score and m.due ~= score then
    add_scheduled(call, key, m.due, digits(m.due))
  end
  if old == no_group then
    return
  end
  local priority_changed, group_changed = old.priority ~= m.priority, old.group ~= m.group
  if not score and (old.due ~= m.due or priority_changed or group_changed) then
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

-- Merge one trigger into the pending message of its key. Return its receipt and the due time. It is dropped if the message
-- has no room for any of it.
local function merge_trigger(call, key, old, options, acc)
  local p, new = call.p, call.new
  call.changed[key] = true
  -- The scheduled time, or false: behind a delivery of its key or group, or already ready.
  local score = scheduled_at(call, key)
  local old_place = no_group
  if not score or old.group ~= "" or options.group ~= "" then
    old_place = { due = old.due, priority = old.priority, group = old.group, rank = old.rank }
  end
  local receipt = "merged"
  new.acc, new.version, new.priority, new.group = acc, options.version, options.priority, options.group
  new.traces = options.trace ~= "" and { 0, options.trace } or nil
  local failed = old.attempts > 0
  local m, lost = merge_messages(p.merge, old, new, true)
  call.lost = call.lost + lost
  if not m then
    call.done.dropped_full = (call.done.dropped_full or 0) + 1
    call.noted[#call.noted + 1] = { "dropped_full", key, old }
    return "dropped", call.now_ms
  elseif failed then
    restart_attempts(p.merge, m)
  end
  if score and score ~= m.due then
    m.due, m.why = score, reason.flush
  end
  if options.at then
    receipt = "replaced"
    m.due, m.why, m.pinned = options.at, reason.time, 1
  elseif m.pinned == 0 and failed and p.merge.op == "last" then
    -- What failed is replaced, so the message is due as a new one is.
    m.due, m.why = due_by_policy(p, nil, nil, m.first, m.count, call.now_ms)
    m.due = math.max(m.due, call.now_ms)
  elseif m.pinned == 0 and not failed and m.earlier == "" and m.why ~= reason.retry then
    -- The policy moves neither a time set by the caller nor a retry's time.
    m.due, m.why = due_by_policy(p, m.due, m.why, m.first, m.count, call.now_ms)
  end
  reschedule_merged(call, key, old_place, score, m, options.at)
  return receipt, m.due
end
