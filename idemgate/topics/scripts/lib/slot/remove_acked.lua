--- @include "topics/lib/slot/header"
-- Remove acked deliveries in one batch: most settled deliveries are acks. `behind` holds the packed messages behind them,
-- by key. These take their places, and are stored first: an ACL denial may end the script anywhere. `entries`: some have any.
local function remove_acked(K, acked, behind, entries)
  if next(behind) == nil then
    redis.call("ZREM", K.leases, unpack(acked))
    redis.call("HDEL", K.messages, unpack(acked))
    if entries then
      redis.call("HDEL", K.inflight, unpack(acked))
    end
    return
  end
  local keys, messages, scheduled, gone = {}, {}, {}, {}
  for key, packed in pairs(behind) do
    local _, _, due = read_header(packed)
    local n = #keys + 1
    keys[n] = key
    messages[2 * n - 1], messages[2 * n], scheduled[2 * n - 1], scheduled[2 * n] = key, packed, due, key
  end
  for _, key in ipairs(acked) do
    gone[#gone + 1] = not behind[key] and key or nil
  end
  redis.call("HDEL", K.meta, "") -- no effect: if an ACL denies HDEL, nothing may be written
  redis.call("ZREM", K.leases, unpack(acked))
  redis.call("HSET", K.messages, unpack(messages)) -- fault: next-kept
  if entries then
    redis.call("HDEL", K.inflight, unpack(acked))
  end
  if #gone > 0 then
    redis.call("HDEL", K.messages, unpack(gone))
  end
  redis.call("HDEL", K.next, unpack(keys))
  redis.call("ZADD", K.scheduled, unpack(scheduled))
end
