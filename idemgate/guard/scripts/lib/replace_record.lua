--- Keys: key
-- Replace an existing record that was in another state. PEXPIRE comes first: a server without memory refuses a script
-- whose first write is SET, and finished work must still be recorded. After another write (`wrote`), nothing is
-- refused any more. A time of 0 ms deletes the key.
local function replace_record(key, packed, ms, wrote)
  if ms == 0 or ms == "0" then
    redis.call("PEXPIRE", key, ms)
  elseif wrote then
    redis.call("SET", key, packed, "PX", ms)
  else
    -- @allow SET
    redis.call("PEXPIRE", key, ms)
    redis.call("SET", key, packed, "KEEPTTL")
  end
end

-- Publish a hint to the callers that wait for this record. A lost hint costs one poll.
local function notify_waiters(key, waited, owner)
  if waited == 1 then
    redis.pcall("PUBLISH", key, owner)
  end
end
