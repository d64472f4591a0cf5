--- @include "lib/schedule/schedule"
--- @include "lib/group/group"
--- @include "lib/slot/message"
--- @include "lib/merge/merge_messages"
--- @include "lib/schedule/unschedule"
--- @include "lib/slot/counters"
-- Finish a delivery for good: schedule the next message of its key, and the next one of its group.
local function finish_delivery(K, p, key, m)
  local waiting = redis.call("HGET", K.pending, key)
  if waiting then
    schedule(K, key, cmsgpack.unpack(waiting))
  end
  group_leave(K, m[message.group], key, p.group_limit)
end

-- Return a delivered message to the pending ones, due at `due`. It merges with a pending message of its key, and a
-- time set by the caller wins. The pending one is the newer, unless `m` is a dead letter; then the last triggers
-- decide. Return 1 if there was one, else 0.
local function requeue(K, p, key, m, due, why)
  local waiting = redis.call("HGET", K.pending, key)
  m[message.due], m[message.why] = due, why
  if waiting then
    waiting = cmsgpack.unpack(waiting)
    local time = waiting[message.pinned] == 1 and waiting or m
    local kept = { [message.attempts] = m[message.attempts], [message.failure] = m[message.failure] }
    local groups = { m[message.group], waiting[message.group] }
    local stood = unschedule(K, key, waiting)
    if stood and stood ~= waiting[message.due] then
      waiting[message.due], waiting[message.why] = stood, "flush"
    end
    kept[message.due], kept[message.why], kept[message.pinned] = time[message.due], time[message.why], time[message.pinned]
    m = waiting[message.last] < m[message.last] and merge_messages(p.merge, waiting, m) or merge_messages(p.merge, m, waiting)
    for at, value in pairs(kept) do
      m[at] = value
    end
    for _, group in ipairs(redis.call("HEXISTS", K.inflight, key) == 0 and groups or {}) do
      -- Leave the former group. If the caller set a time, which may be far away, no group waits for it.
      if group ~= m[message.group] or waiting[message.pinned] == 1 then
        group_leave(K, group, key, p.group_limit)
      else
        -- The message may have been the next of its group and is no longer.
        group_promote(K, group, p.group_limit)
      end
    end
  end
  redis.call("HSET", K.pending, key, track_large(K, cmsgpack.pack(m)))
  schedule(K, key, m)
  return waiting and 1 or 0
end
