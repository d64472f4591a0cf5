--- @include "lib/slot/message"
-- Build the member of the ready set: it sorts by due time, then key.
local function ready_member(due, key)
  return string.format("%015.0f", due) .. key
end

-- Build the member of the waiting set: it sorts by group, rank (with priorities only), due time, then key.
local function waiting_member(key, m)
  return m.group .. "\0" .. (m.rank or "") .. "\0" .. ready_member(m.due, key)
end

-- Schedule a pending message. A message behind a delivery of the same key is in no set: settling that delivery
-- schedules it.
local function schedule(K, key, m)
  if redis.call("HEXISTS", K.inflight, key) == 0 then
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
  if redis.call("ZREM", K.ready, ready_member(m.due, key)) == 1 then
    return m.due
  end
  if m.group ~= "" and redis.call("ZREM", K.group_waiting, waiting_member(key, m)) == 1 then
    return m.due
  end
end

-- Return the hash that holds the pending message of a key: `next` while a delivery of the key is in flight.
local function pending_hash(K, key)
  return redis.call("HEXISTS", K.inflight, key) == 1 and K.next or K.messages
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
