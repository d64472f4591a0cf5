--- @include "lib/lined"
--- @include "lib/message"
--- @include "lib/sortable"
-- Takes a pending message out of where it stands: scheduled, ready, or in the line of its group. Returns when it was due, or nil when
-- it stood behind a delivery of its own key.
local function unplace(K, key, m)
  local due = tonumber(redis.call("ZSCORE", K.due, key))
  if due then
    redis.call("ZREM", K.due, key)
    return due
  end
  if redis.call("ZREM", K.ready, sortable(m[message.due], key)) == 1 then
    return m[message.due]
  end
  if m[message.group] ~= "" and redis.call("ZREM", K.line, lined(key, m)) == 1 then
    return m[message.due]
  end
end
