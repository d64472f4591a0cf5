--- @include "lib/schedule/set_members"
--- @include "lib/slot/message"
-- Remove a pending message from the set it is in: scheduled, ready, or waiting for its group. Return its due time,
-- ms, or nil if it was behind a delivery of the same key.
local function unschedule(K, key, m)
  local due = tonumber(redis.call("ZSCORE", K.scheduled, key))
  if due then
    redis.call("ZREM", K.scheduled, key)
    return due
  end
  if redis.call("ZREM", K.ready, ready_member(m[message.due], key)) == 1 then
    return m[message.due]
  end
  if m[message.group] ~= "" and redis.call("ZREM", K.group_waiting, waiting_member(key, m)) == 1 then
    return m[message.due]
  end
end
