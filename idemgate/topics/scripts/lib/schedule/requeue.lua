--- Keys: hash
--- @include "topics/lib/slot/message"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/payloads"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/slot/reopen_window"
-- Schedule the next message of a key whose delivery ended (end_delivery), and the next one of its group. `failed`: it was
-- cancelled or died. A message behind it has opened a window of its own.
local function finish_delivery(K, p, key, group, failed)
  local waiting = redis.call("HGET", K.messages, key)
  if waiting then
    schedule(K, key, decode_message(waiting))
  elseif failed then
    reopen_window(K, p, key)
  end
  group_leave(K, group, key, p.group_limit)
end

-- Lower the priority of a message whose attempt failed, if the topic asks for it.
local function lower_priority(p, m)
  if p.retry_penalty then
    m.priority = (tonumber(m.priority) or 0) - p.retry_penalty
  end
end

-- Return true if a message has no attempt left. What still holds failed payloads has twice as many in all, however often
-- triggers join it: one of its payloads may fail for ever.
local function is_exhausted(p, m)
  return m.attempts >= p.attempts or m.attempts + (tonumber(m.earlier) or 0) >= 2 * p.attempts
end

-- Merge a message that returns with the pending one of its key. Return the message, and whether its time is that of the
-- pending one: the caller set it, or nothing of the payload that returns is left. The last triggers decide which is newer: either
-- may be a redriven dead letter.
local function fold(K, p, m, waiting)
  local newer = waiting.last > m.last or waiting.last == m.last and waiting.serial > m.serial
  local replaced = newer and p.merge.op == "last" and m.attempts > 0
  if newer and m.attempts > 0 then
    restart_attempts(p.merge, m)
  end
  local own, moved = replaced and waiting or m, replaced or waiting.pinned == 1
  local time, kept = moved and waiting or m, { attempts = own.attempts, failure = own.failure, earlier = own.earlier }
  kept.due, kept.why, kept.pinned = time.due, time.why, time.pinned -- read now: merging writes into one of them
  local lost
  m, lost = merge_messages(p.merge, newer and m or waiting, newer and waiting or m)
  add_counters(K, { items_dropped = lost })
  for name, value in pairs(kept) do
    m[name] = value
  end
  return m, moved
end

-- Return a delivered message, whose delivery ended (end_delivery), to the pending ones, due at `due`. It merges with a
-- pending message of its key (fold). Return 1 if there was one, else 0.
local function requeue(K, p, key, m, due, why)
  local hash = pending_hash(K, key)
  local waiting = redis.call("HGET", hash, key)
  m.due, m.why = due, why
  if waiting then
    waiting = decode_message(waiting)
    local groups, moved = { m.group, waiting.group }, nil
    local stood = unschedule(K, key, waiting)
    if stood and stood ~= waiting.due then
      waiting.due, waiting.why = stood, reason.flush
    end
    m, moved = fold(K, p, m, waiting)
    for _, group in ipairs(hash == K.messages and groups or {}) do
      -- Leave the former group. If its time is another, which may be far away, no group waits for it.
      if group ~= m.group or moved then
        group_leave(K, group, key, p.group_limit)
      else
        -- The message may have been the next of its group and is no longer.
        group_promote(K, group, p.group_limit)
      end
    end
  end
  redis.call("HSET", hash, key, track_large(K, encode_message(m)))
  schedule(K, key, m)
  return waiting and 1 or 0
end
