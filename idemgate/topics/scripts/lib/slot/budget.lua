--- @include "lib/now"
-- Costs of messages in the byte budget. Unions and field merges are unpacked into single values. Each value costs as
-- much as sixteen bytes of text. `budget.by_value(p)` says that a policy merges that way, and `budget.cost(p, size)`
-- returns the cost of a message. Large messages are large by their texts, so the number of values is capped at 4096.
local budget = {}
function budget.by_value(p)
  return p.merge.op == "union" or p.merge.op == "fields"
end
function budget.cost(p, size)
  return budget.by_value(p) and size + 15 * math.min(size, 4096) or size
end

-- Return how many of these keys fit into `room` bytes, counted from the first, and the remaining room. The size is
-- what one part of the slot stores for a key, or two parts. Where both are merged value by value, the cost doubles.
-- One key of any size fits into an untouched `max_call_bytes`. Lengths are queried only if the slot has held a large
-- entry (track_large), or if the policy merges by value. Otherwise the number of keys per call bounds the bytes.
local function count_within_budget(K, p, names, room, part, other)
  if K.large == nil then
    K.large = redis.call("HEXISTS", K.meta, "large") == 1
  end
  if #names == 0 or not budget.by_value(p) and not K.large then
    return #names, room
  end
  for i, name in ipairs(names) do
    local size, met = redis.call("HSTRLEN", K[part], name), other and redis.call("HSTRLEN", K[other], name) or 0
    size = #name + budget.cost(p, size + met) * (budget.by_value(p) and size > 0 and met > 0 and 2 or 1)
    if size > room and room < max_call_bytes then
      return i - 1, 0
    end
    room = room - size
  end
  return #names, room
end
