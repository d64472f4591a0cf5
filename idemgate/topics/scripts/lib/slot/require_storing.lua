-- Run, without effect, the commands that store the message of an ended delivery again. An ACL denial must end the script
-- before it removes the message. Start with a deletion: a server without memory refuses a script whose first write may
-- allocate.
local function require_storing(K)
  redis.call("ZSCORE", K.scheduled, "")
  redis.call("HDEL", K.meta, "")
  redis.call("HSET", K.meta, "", "")
  redis.call("HDEL", K.meta, "")
end
