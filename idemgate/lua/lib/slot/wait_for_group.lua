--- @include "lib/slot/message"
--- @include "lib/schedule/rank"
--- @include "lib/schedule/set_members"
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
