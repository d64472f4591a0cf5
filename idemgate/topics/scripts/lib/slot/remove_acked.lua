--- @include "topics/lib/slot/header"
-- Remove acked deliveries in one batch: most settled deliveries are acks. `behind` holds the packed messages behind them,
-- by key. These take their places.
local function remove_acked(K, acked, behind)
  redis.call("ZREM", K.leases, unpack(acked))
  redis.call("HDEL", K.inflight, unpack(acked))
  redis.call("HDEL", K.messages, unpack(acked))
  local keys, messages, scheduled = {}, {}, {}
  for key, packed in pairs(behind) do
    local _, _, due = read_header(packed)
    local n = #keys + 1
    keys[n] = key
    messages[2 * n - 1], messages[2 * n], scheduled[2 * n - 1], scheduled[2 * n] = key, packed, due, key
  end
  if #keys > 0 then
    redis.call("HDEL", K.next, unpack(keys))
    redis.call("HSET", K.messages, unpack(messages)) -- fault: next-kept
    redis.call("ZADD", K.scheduled, unpack(scheduled))
  end
end
