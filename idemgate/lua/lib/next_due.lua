-- When this slot next has work: the earliest due time or lapsing lease, ms; 0 = nothing is scheduled or in flight. `opens` is when
-- the slot may hand out again: 0 = it may, a time where a limit holds it back, nil when only the end of a delivery or a lease can open it.
local function next_due(K, now_ms, opens)
  local due = redis.call("ZRANGE", K.due, 0, 0, "WITHSCORES")
  local lease = redis.call("ZRANGE", K.lease, 0, 0, "WITHSCORES")
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
