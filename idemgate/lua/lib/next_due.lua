-- When this slot next has work: the earliest due time or lapsing lease, ms; 0 = nothing is scheduled or in flight.
local function next_due(K)
  local due = redis.call("ZRANGE", K.due, 0, 0, "WITHSCORES")
  local lease = redis.call("ZRANGE", K.lease, 0, 0, "WITHSCORES")
  local a, b = tonumber(due[2]), tonumber(lease[2])
  if a and b then
    return math.min(a, b)
  end
  return a or b or 0
end
