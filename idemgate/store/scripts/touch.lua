-- Write a key, so that a following WAIT or WAITAOF on the same connection covers all earlier writes. Without memory
-- it still works while its key exists. The key lives for an hour.
--
-- KEYS[1]  the durability key of the namespace
-- ->       1
if redis.call("PEXPIRE", KEYS[1], 3600000) == 0 then
  redis.call("SET", KEYS[1], "1", "PX", 3600000)
end
return 1
