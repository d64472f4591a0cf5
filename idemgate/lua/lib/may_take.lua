-- Ask before the first write: whose access list lacks what takes is refused here. Removes nothing. But after a command that
-- writes the server refuses none for lack of memory, so it is made only where it will be refused, or cannot be asked about (Redis 6.2).
local function may_take(K)
  if not redis.acl_check_cmd or not redis.acl_check_cmd("ZREMRANGEBYRANK", K.due, 1, 0) then
    redis.call("ZREMRANGEBYRANK", K.due, 1, 0)
  end
end
