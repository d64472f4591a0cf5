--- @include "topics/lib/slot/message"
-- Build the member of the ready set: it sorts by due time, then the serial with which a message of a group became ready.
-- Others have "-" instead.
local function ready_member(key, m)
  return string.format("%015.0f", m.due) .. (m.group == "" and "-" or string.sub(m.rank or "", -15)) .. key
end

-- Build the member of the waiting set: it sorts by group, rank (with priorities only), due time, then the serial with
-- which the message began to wait. A message that never waited has none.
local function waiting_member(key, m)
  local rank = m.rank or ""
  return m.group .. "\0" .. string.sub(rank, 1, -16) .. "\0" .. string.format("%015.0f", m.due) .. string.sub(rank, -15) .. key
end

-- Schedule a pending message. A message behind a delivery of the same key is in no set: settling that delivery
-- schedules it.
local function schedule(K, key, m)
  if not redis.call("ZSCORE", K.leases, key) then
    redis.call("ZADD", K.scheduled, m.due, key)
  end
end

-- Remove a pending message from the set it is in: scheduled, ready, or waiting for its group. Return its due time,
-- ms, or nil if it was behind a delivery of the same key.
local function unschedule(K, key, m)
  local due = tonumber(redis.call("ZSCORE", K.scheduled, key))
  if due then
    redis.call("ZREM", K.scheduled, key)
    return due
  end
  if redis.call("ZREM", K.ready, ready_member(key, m)) == 1 then
    return m.due
  end
  if m.group ~= "" and redis.call("ZREM", K.group_waiting, waiting_member(key, m)) == 1 then
    return m.due
  end
end

-- Return the hash that holds the pending message of a key: `next` while a delivery of the key is in flight.
local function pending_hash(K, key)
  return redis.call("ZSCORE", K.leases, key) and K.next or K.messages
end

-- Return the message of a delivery in flight, with the due time of its delivery.
local function delivered_message(K, key, d)
  local m = decode_message(redis.call("HGET", K.messages, key))
  if d.due and d.due ~= m.due then
    m.due, m.why = d.due, reason.flush
  end
  return m
end

-- End a delivery: its lease, its entry and its message. The message behind it, if any, takes its place.
local function end_delivery(K, key)
  redis.call("ZREM", K.leases, key)
  redis.call("HDEL", K.inflight, key)
  local waiting = redis.call("HGET", K.next, key)
  if waiting then
    redis.call("HDEL", K.next, key)
    redis.call("HSET", K.messages, key, waiting)
  else
    redis.call("HDEL", K.messages, key)
  end
end

-- Add a key to the active members of its group. An active key stays active.
local function group_enter(K, group, key)
  local inside = redis.call("HGET", K.group_active, group)
  inside = inside and cmsgpack.unpack(inside) or {}
  for _, one in ipairs(inside) do
    if one == key then
      return
    end
  end
  inside[#inside + 1] = key
  redis.call("HSET", K.group_active, group, cmsgpack.pack(inside))
end

-- Schedule the first waiting messages of a group, as many as the group has room for.
local function group_promote(K, group, limit)
  local inside = redis.call("HGET", K.group_active, group)
  local room = limit - (inside and #cmsgpack.unpack(inside) or 0)
  if group == "" or room <= 0 then
    return
  end
  for _, member in ipairs(redis.call("ZRANGEBYLEX", K.group_waiting, "[" .. group .. "\0", "(" .. group .. "\1", "LIMIT", 0, room)) do
    redis.call("ZREM", K.group_waiting, member)
    local at = string.find(member, "\0", #group + 2, true)
    redis.call("ZADD", K.scheduled, tonumber(string.sub(member, at + 1, at + 15)), string.sub(member, at + 31))
  end
end

-- Remove a key from the active members of its group, and schedule the next waiting message.
local function group_leave(K, group, key, limit)
  if group == "" then
    return
  end
  local inside = redis.call("HGET", K.group_active, group)
  local left = {}
  for _, one in ipairs(inside and cmsgpack.unpack(inside) or {}) do
    if one ~= key then
      left[#left + 1] = one
    end
  end
  redis.call("HDEL", K.group_active, group)
  if #left > 0 then
    redis.call("HSET", K.group_active, group, cmsgpack.pack(left))
  end
  group_promote(K, group, limit)
end
