--- @include "lib/digits"
--- @include "lib/slot/message"
--- @include "lib/slot/inflight"
--- @include "lib/schedule/next_due"
--- @include "lib/schedule/set_members"
--- @include "lib/schedule/rank"
-- Return the deliveries of an earlier take that it still owns.
local function replay_take(K, known, now_ms)
  local token, reply = digits(known[3]), { "ok", now_ms, next_due(K, now_ms, 0), known[2], 0 }
  for _, key in ipairs(known[1]) do
    local entry, packed = redis.call("HGET", K.inflight, key), redis.call("HGET", K.messages, key)
    local d, flags, _, due = entry and parse_entry(entry), read_header(packed)
    if d and flags and d.token == token then
      local n = #reply
      reply[5], reply[n + 1], reply[n + 2], reply[n + 3] = known[3], key, d.due or due, packed
    end
  end
  return reply
end

-- Return the next due messages: their keys, their due times, and their members in the set that holds them.
local function next_due_messages(K, ranked, now_ms, most)
  local found, dues = {}, {}
  if ranked then
    local members = redis.call("ZRANGE", K.ready, 0, most - 1)
    for i, member in ipairs(members) do
      found[i], dues[i] = string.sub(member, 16), tonumber(string.sub(member, 1, 15))
    end
    return found, dues, members
  end
  local scored = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
  for i = 1, #scored, 2 do
    local n = (i + 1) / 2
    found[n], dues[n] = scored[i], tonumber(scored[i + 1])
  end
  return found, dues, found
end

-- Let a message wait for its group, which is full.
local function wait_for_group(K, p, key, due, m)
  if due ~= m.due then
    m.due, m.why = due, reason.flush
  end
  -- Most ranks are negative. The offset and 16 digits sort correctly up to the highest priority.
  m.rank = p.ranked and string.format("%016.0f", rank_of(p, m) + 4503599627370496) or nil
  redis.call("HSET", K.messages, key, encode_message(m))
  redis.call("ZADD", K.group_waiting, 0, waiting_member(key, m))
end
