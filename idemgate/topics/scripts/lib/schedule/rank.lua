--- @include "topics/lib/slot/message"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/slot/budget"
-- Return the rank of a due message in a topic with priorities. The lowest rank goes first.
local function rank_of(p, m)
  local points = tonumber(m.priority) or 0
  return p.boost and m.due - points * p.boost or -points
end

-- Note with which serial a message of a group becomes ready. Return true if the message has to be written.
local function set_ready_serial(m)
  local serial = m.group ~= "" and string.format("%015.0f", m.serial)
  if not serial or m.rank and string.sub(m.rank, -15) == serial then
    return false
  end
  m.rank = serial
  return true
end

-- Move due messages into the ready set, which orders them by rank, due time and serial. One call moves at most 160 of
-- them and 512 KiB, and stops at a corrupt message. Return a problem if the very first is corrupt; then nothing was
-- written. Otherwise return nil, and whether more are due.
local function rank_due(K, p, now_ms)
  local found = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, 161)
  local next_keys, keys, moved, ranks = {}, {}, {}, {}
  for i = 1, #found, 2 do
    next_keys[#next_keys + 1] = found[i]
  end
  local accepted = math.min(160, count_within_budget(K, p, next_keys, 4 * max_call_bytes, "messages"))
  for i, packed in ipairs(accepted > 0 and redis.call("HMGET", K.messages, unpack(next_keys, 1, accepted)) or {}) do
    local key, due = next_keys[i], tonumber(found[2 * i])
    local flags, _, message_due = read_header(packed)
    local m = flags and flags < 2 and { due = message_due, priority = "", group = "" } or validate_message(packed)
    if not m and i == 1 then
      return packed and corrupt_entry(K.messages, key) or missing_entry(K.scheduled, key)
    elseif not m then
      break
    end
    keys[i] = key
    local flushed = due ~= m.due
    if flushed then
      m.due, m.why = due, reason.flush
    end
    if set_ready_serial(m) then
      moved[#moved + 1], moved[#moved + 2] = key, track_large(K, encode_message(m))
    elseif flushed then
      moved[#moved + 1], moved[#moved + 2] = key, with_due(packed, due, reason.flush)
    end
    ranks[#ranks + 1] = rank_of(p, m)
    ranks[#ranks + 1] = ready_member(key, m)
  end
  if #keys > 0 then
    redis.call("ZADD", K.ready, unpack(ranks))
    redis.call("ZREM", K.scheduled, unpack(keys))
  end
  if #moved > 0 then
    redis.call("HSET", K.messages, unpack(moved))
  end
  return nil, accepted < #next_keys
end
