--- Makes a part of the reply.
--- @include "lib/now"
--- @include "topics/lib/slot/header"
--- @include "topics/lib/slot/read_entries"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/slot/remove_acked"
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

-- Return the packed messages behind the deliveries, by index. Return nil if they may be too many bytes for one call:
-- `settle_any` counts these first.
local function read_behind(K, keys)
  if redis.call("HLEN", K.next) == 0 then
    return {}
  elseif #keys > 1 and redis.call("HEXISTS", K.meta, "large") == 1 then
    return nil
  end
  return redis.call("HMGET", K.next, unpack(keys))
end

-- Settle acks of deliveries that are held, have no group and were not cancelled. `next_messages` holds what `read_behind`
-- returned. Return one word per delivery, and whether messages were scheduled. Return nil if a delivery needs `settle_any`:
-- then nothing was written.
local function settle_plain(K, keys, tokens, next_messages)
  local entries, stored = read_entries(K, keys, tokens)
  local acked, n, triggers, reply, behind = {}, 0, 0, {}, {}
  redis.call("HLEN", K.messages) -- a key of another type must end this before the first write
  for i = 1, #keys do
    local key, token, count, packed = keys[i], entries[keys[i]], 1, next_messages[i]
    if token and token ~= tokens[i] and not string.find(token, "^%d+$") then
      token, count = string.match(token, "^(%d+) %-?%d+ 0 (%d+) $") -- see parse_entry
      if not token then
        return nil
      end
    end
    if token ~= tokens[i] or packed and not read_header(packed) then -- fault: ack-token
      return nil
    end
    n, triggers = n + 1, triggers + count
    if packed then
      behind[key] = packed -- not `packed or nil`: to assign nil makes a field
    end
    acked[n], entries[key], reply[i] = key, nil, "ok" -- it is settled at most once
  end
  -- @allow HDEL HSET PEXPIRE UNLINK ZADD ZRANGE
  local schedules = next(behind) ~= nil
  if schedules then
    redis.call("ZCARD", K.scheduled)
  end
  remove_acked(K, acked, behind, stored)
  add_counters(K, { acked = n, acked_triggers = triggers })
  return reply, schedules
end

-- Settle deliveries. `endings` holds two values per delivery: key, fencing token. `others` maps the index of each delivery that
-- is not a plain ack to {verb, delay in ms, failure}. Messages waiting behind the deliveries are scheduled.
-- Deliveries beyond `max_call_bytes` return "left" and need another call. Return one word per delivery and whether other
-- messages may have been scheduled. On a problem return nil and the problem; nothing was written.
local function settle_deliveries(K, p, endings, others, now_ms, request)
  local keys, tokens = split_endings(endings)
  -- Two paths: with `settle_any` alone, settling takes 9 % more instructions.
  local next_messages = not next(others) and #keys > 0 and not p.history and read_behind(K, keys)
  if next_messages then
    local reply, schedules = settle_plain(K, keys, tokens, next_messages)
    if reply then
      return reply, schedules
    end
  end
  --- @include "topics/lib/slot/settle_any"
  return settle_any(K, p, keys, tokens, others, now_ms, request)
end
