-- Writes something, so that a WAIT or WAITAOF behind it on the same connection covers all that was written before.
-- Out of memory it still can, as long as its key is there. One key, an hour.
--
-- KEYS[1]  the touched key of the namespace
-- ->       1
if redis.call("PEXPIRE", KEYS[1], 3600000) == 0 then
  redis.call("SET", KEYS[1], "1", "PX", 3600000)
end
return 1
