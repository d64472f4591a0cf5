--- @include "lib/schedule/set_members"
-- Remove a pending message from the set it is in: scheduled, ready, or waiting for its group. Return its due time,
-- ms, or nil if it was behind a delivery of the same key.
local function unschedule(K, key, m)
  local due = tonumber(redis.call("ZSCORE", K.scheduled, key))
  if due then
    redis.call("ZREM", K.scheduled, key)
    return due
  end
  if redis.call("ZREM", K.ready, ready_member(m.due, key)) == 1 then
    return m.due
  end
  if m.group ~= "" and redis.call("ZREM", K.group_waiting, waiting_member(key, m)) == 1 then
    return m.due
  end
end
