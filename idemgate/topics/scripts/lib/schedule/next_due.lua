--- @include "topics/lib/slot/lease_times"
-- Return when the first scheduled or ready message is due, ms, or nil.
local function waiting_due(K, now_ms)
  if redis.call("ZCARD", K.ready) > 0 then
    return now_ms
  end
  return tonumber(redis.call("ZRANGE", K.scheduled, "0", "0", "WITHSCORES")[2])
end

-- Return when this slot next has work, ms: the earliest due time or lease end, or 0 if nothing is scheduled or in
-- flight. `opens` says when it may deliver again: 0 = now, a time in ms under a rate limit, nil = when a delivery or
-- a lease ends. `due` is the result of `waiting_due`, for a caller that had to read before it wrote.
local function next_due(K, now_ms, opens, due)
  due = due or due == nil and waiting_due(K, now_ms) or nil
  if not opens then
    due = nil
  elseif due and due < opens then
    due = opens
  end
  if due and due <= now_ms then
    return due -- a lease that ended may be earlier, but the slot has work now
  end
  local start = redis.call("ZRANGE", K.leases, "0", "0", "WITHSCORES")[2]
  local lease = start and lease_end(K, start)
  if due and lease then
    return math.min(due, lease)
  end
  return due or lease or 0
end

-- Publish a hint that a slot at its in-flight limit may have room again: no worker polls at that moment.
local function notify_reopened(K, p, due, now_ms)
  if p.limited and due > 0 and due <= now_ms then
    redis.pcall("PUBLISH", K.scheduled, string.format("%.0f", now_ms))
  end
end
