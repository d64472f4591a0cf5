--- @include "lib/slot/message"
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
