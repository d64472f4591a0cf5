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

-- Return true if a message may be behind one of the deliveries. Where messages may be large, a batch reads none of them
-- here: `settle_any` counts their bytes first.
local function any_behind(K, keys)
  if redis.call("HLEN", K.next) == 0 then
    return false
  elseif #keys == 1 then
    return redis.call("HEXISTS", K.next, keys[1]) == 1
  elseif redis.call("HEXISTS", K.meta, "large") == 1 then
    return true
  end
  for _, packed in ipairs(redis.call("HMGET", K.next, unpack(keys))) do
    if packed then
      return true
    end
  end
  return false
end

-- Settle acks of deliveries that have no group and were not cancelled. No message is behind any of them. Return one word
-- per delivery. Return nil if a delivery needs `settle_any`: then nothing was written.
local function settle_plain(K, keys, tokens)
  local entries, acked, n, triggers, lost, reply, seen = redis.call("HMGET", K.inflight, unpack(keys)), {}, 0, 0, 0, {}, {}
  redis.call("HLEN", K.messages) -- a key of another type must end this before the first write
  for i = 1, #keys do
    local key, token, count = keys[i], entries[i], 1
    if token and token ~= tokens[i] and not string.find(token, "^%d+$") then
      token, count = string.match(token, "^(%d+) %-?%d+ 0 (%d+) $") -- see parse_entry
      if not token then
        return nil
      end
    end
    if token == tokens[i] and not seen[key] then
      n, triggers = n + 1, triggers + count
      acked[n], seen[key], reply[i] = key, true, "ok"
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
  add_counters(K, { acked = n, acked_triggers = triggers, lost = lost })
  return reply
end

-- Settle deliveries. `endings` holds two values per delivery: key, fence. `others` maps the index of each delivery that
-- is not a plain ack to {verb, delay in ms, failure}. Messages waiting behind the deliveries are scheduled.
-- Deliveries beyond `max_call_bytes` return "left" and need another call. Return one word per delivery and whether other
-- messages may have been scheduled. On a problem return nil and the problem; nothing was written.
local function settle_deliveries(K, p, endings, others, now_ms)
  local keys, tokens = split_endings(endings)
  if not next(others) and #keys > 0 and not any_behind(K, keys) then
    local reply = settle_plain(K, keys, tokens)
    if reply then
      return reply, false
    end
  end
  --- @include "lib/slot/settle_any"
  return settle_any(K, p, keys, tokens, others, now_ms)
end
