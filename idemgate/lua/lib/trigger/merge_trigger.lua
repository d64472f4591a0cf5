--- @include "lib/trigger/pending"
--- @include "lib/slot/header"
--- @include "lib/merge/merge_messages"
--- @include "lib/schedule/due_by_policy"
--- @include "lib/schedule/schedule"
--- @include "lib/schedule/unschedule"
--- @include "lib/group/group"
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
      add_scheduled(call, key, m.due)
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
  local before = { due = old.due, priority = old.priority, group = old.group, rank = old.rank }
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
  reschedule_merged(call, key, before, score, m, options.at)
  return receipt, m.due
end
