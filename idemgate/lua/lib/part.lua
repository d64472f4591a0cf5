--- @include "lib/message"
-- Leaves in a message only what failed of it. `packed` is {failure, how many items failed, their accumulator}. An item of an append is
-- one trigger, so that those of the others are done; which triggers the items of a union or the fields of a mapping came from is not
-- known, and all of them stay counted. Returns the failure, the items, and how many triggers are done.
local function part(p, m, packed)
  local failure, items, acc = unpack(cmsgpack.unpack(packed))
  local triggers = p.merge.op == "append" and items or m[message.count]
  local done = m[message.count] - triggers
  m[message.acc], m[message.count], m[message.splits] = acc, triggers, m[message.splits] + 1
  return failure, items, done
end
