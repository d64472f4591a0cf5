--- @include "lib/slot/budget"
-- Return how many triggers fit into `max_call_bytes`, at least one. The stored data of a key counts when its key first
-- appears. A message that grows with each trigger counts an eighth each time because it is packed again. If the slot never
-- held a large entry (track_large) and values are not merged one by one, the number of triggers bounds the bytes.
local function count_accepted(K, p, names, accs)
  local grows = p.merge.op == "append" or p.merge.op == "fields"
  local large, known, room = budget.by_value(p) or K.large, {}, max_call_bytes
  for n = 1, (grows or large) and #names or 0 do
    local key = names[n]
    local size = known[key]
    local cost = size and (grows and budget.cost(p, size) / 8 or 0)
    if not size then
      size = large and redis.call("HSTRLEN", K.messages, key) + redis.call("HSTRLEN", K.next, key) or 0
      cost = large and budget.cost(p, size) or 0
    end
    if cost > room and n > 1 then
      return n - 1
    end
    room, known[key] = room - cost, size + #accs[n]
  end
  return #names
end
