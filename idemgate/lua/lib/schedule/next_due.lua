-- Return when this slot next has work, ms: the earliest due time or lease end, or 0 if nothing is scheduled or in
-- flight. `opens` says when it may deliver again: 0 = now, a time in ms under a rate limit, nil = when a delivery or
-- a lease ends.
local function next_due(K, now_ms, opens)
  local due = redis.call("ZRANGE", K.scheduled, 0, 0, "WITHSCORES")
  local lease = redis.call("ZRANGE", K.leases, 0, 0, "WITHSCORES")
  local a, b = tonumber(due[2]), tonumber(lease[2])
  if redis.call("ZCARD", K.ready) > 0 then
    a = now_ms
  end
  if not opens then
    a = nil
  elseif a and a < opens then
    a = opens
  end
  if a and b then
    return math.min(a, b)
  end
  return a or b or 0
end
