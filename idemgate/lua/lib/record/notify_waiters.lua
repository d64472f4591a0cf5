-- Publish a hint to the callers that wait for this record. A lost hint costs one poll.
local function notify_waiters(key, waited, owner)
  if waited == 1 then
    redis.pcall("PUBLISH", key, owner)
  end
end
