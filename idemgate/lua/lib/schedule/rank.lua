--- @include "lib/slot/message"
--- @include "lib/validate/stored"
--- @include "lib/schedule/schedule"
--- @include "lib/slot/budget"
-- Return the rank of a due message in a topic with priorities. The lowest rank goes first.
local function rank_of(p, m)
  local points = tonumber(m.priority) or 0
  return p.boost and m.due - points * p.boost or -points
end

-- Move due messages of a topic with priorities into the ready set. One call moves at most 160 of them and 512 KiB,
-- and stops at a corrupt message. Return a problem if the very first is corrupt; then nothing was written. Otherwise
-- return nil.
local function rank_due(K, p, now_ms)
  local found = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, 160)
  local next_keys, keys, moved, ranks = {}, {}, {}, {}
  for i = 1, #found, 2 do
    next_keys[#next_keys + 1] = found[i]
  end
  local accepted = count_within_budget(K, p, next_keys, 4 * max_call_bytes, "messages")
  for i, packed in ipairs(accepted > 0 and redis.call("HMGET", K.messages, unpack(next_keys, 1, accepted)) or {}) do
    local key, due, m = next_keys[i], tonumber(found[2 * i]), validate_message(packed)
    if not m and i == 1 then
      return packed and corrupt_entry(K.messages, key) or missing_entry(K.scheduled, key)
    elseif not m then
      break
    end
    keys[i] = key
    if due ~= m.due then
      m.due, m.why = due, reason.flush
      moved[#moved + 1] = key
      moved[#moved + 1] = with_due(packed, due, reason.flush)
    end
    ranks[#ranks + 1] = rank_of(p, m)
    ranks[#ranks + 1] = ready_member(due, key)
  end
  if #keys > 0 then
    redis.call("ZADD", K.ready, unpack(ranks))
    redis.call("ZREM", K.scheduled, unpack(keys))
  end
  if #moved > 0 then
    redis.call("HSET", K.messages, unpack(moved))
  end
end
