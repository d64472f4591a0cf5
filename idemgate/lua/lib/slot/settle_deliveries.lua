--- @include "lib/now"
--- @include "lib/slot/counters"
-- Split the packed deliveries, key and token each, into the keys and the tokens as text. Most share a token.
local function split_endings(endings)
  local keys, tokens, last, text = {}, {}, nil, nil
  for i = 1, #endings, 2 do
    if endings[i + 1] ~= last then
      last, text = endings[i + 1], digits(endings[i + 1])
    end
    local n = (i + 1) / 2
    keys[n], tokens[n] = endings[i], text
  end
  return keys, tokens
end

-- Settle acks of deliveries whose entries are only tokens, which most are. No message is behind any of them. Return one word
-- per delivery. Return nil if a delivery needs `settle_any`: then nothing was written.
local function settle_plain(K, keys, tokens)
  local entries, acked, n, lost, reply, seen = redis.call("HMGET", K.inflight, unpack(keys)), {}, 0, 0, {}, {}
  redis.call("HLEN", K.messages) -- a key of another type must end this before the first write
  for i = 1, #keys do
    local key, entry = keys[i], entries[i]
    if entry == tokens[i] and not seen[key] then
      n = n + 1
      acked[n], seen[key], reply[i] = key, true, "ok"
    elseif entry and not string.find(entry, "^%d+$") then
      return nil
    else
      lost, reply[i] = lost + 1, "lost"
    end
  end
  if n > 0 then
    redis.call("ZREM", K.leases, unpack(acked))
    redis.call("HDEL", K.inflight, unpack(acked))
    redis.call("HDEL", K.messages, unpack(acked))
  else
    redis.call("ZCARD", K.leases)
    redis.call("HDEL", K.meta, "") -- a server without memory refuses a script whose first write may allocate
  end
  add_counters(K, { acked = n, acked_triggers = n, lost = lost })
  return reply
end

-- Settle deliveries. `endings` holds two values per delivery: key, fence. `others` maps the index of each delivery that
-- is not a plain ack to {verb, delay in ms, failure}. Messages waiting behind the deliveries are scheduled.
-- Deliveries beyond `max_call_bytes` return "left" and need another call. Return one word per delivery and whether other
-- messages may have been scheduled. On a problem return nil and the problem; nothing was written.
local function settle_deliveries(K, p, endings, others, now_ms)
  local keys, tokens = split_endings(endings)
  if not next(others) and #keys > 0 and redis.call("HLEN", K.next) == 0 then
    local reply = settle_plain(K, keys, tokens)
    if reply then
      return reply, false
    end
  end
  --- @include "lib/slot/settle_any"
  return settle_any(K, p, keys, tokens, others, now_ms)
end
