--- @include "lib/slot/message"
--- @include "lib/schedule/schedule"
--- @include "lib/merge/payloads"
--- @include "lib/slot/counters"
--- @include "lib/slot/reopen_window"
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

-- Return a delivered message, whose delivery ended (end_delivery), to the pending ones, due at `due`. It merges with a
-- pending message of its key, and a time set by the caller wins. The pending one is the newer, unless `m` is a dead
-- letter; then the last triggers decide. Return 1 if there was one, else 0.
local function requeue(K, p, key, m, due, why)
  local hash = pending_hash(K, key)
  local waiting = redis.call("HGET", hash, key)
  m.due, m.why = due, why
  if waiting then
    waiting = decode_message(waiting)
    local pinned = waiting.pinned == 1 -- read now: merging may write into `waiting`
    local time = pinned and waiting or m
    local kept = { attempts = m.attempts, failure = m.failure }
    local groups = { m.group, waiting.group }
    local stood = unschedule(K, key, waiting)
    if stood and stood ~= waiting.due then
      waiting.due, waiting.why = stood, reason.flush
    end
    kept.due, kept.why, kept.pinned = time.due, time.why, time.pinned
    m = waiting.last < m.last and merge_messages(p.merge, waiting, m) or merge_messages(p.merge, m, waiting)
    for name, value in pairs(kept) do
      m[name] = value
    end
    for _, group in ipairs(hash == K.messages and groups or {}) do
      -- Leave the former group. If the caller set a time, which may be far away, no group waits for it.
      if group ~= m.group or pinned then
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
