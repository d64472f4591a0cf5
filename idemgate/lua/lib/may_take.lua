-- Ask before the first write: whose access list lacks what takes is refused here. Removes nothing.
local function may_take(K)
  redis.call("ZREMRANGEBYRANK", K.due, 1, 0)
end
