--- @include "lib/message"
-- A packed message as an array, or nil for what none of our scripts packed. Ask before the first write: an error undoes nothing.
local function opened(packed)
  local whole, m = pcall(cmsgpack.unpack, packed)
  local ours = whole and type(m) == "table" and type(m[message.count]) == "number" and type(m[message.first]) == "number"
    and type(m[message.last]) == "number" and type(m[message.due]) == "number" and type(m[message.attempts]) == "number"
    and type(m[message.pinned]) == "number" and type(m[message.priority]) == "number" and type(m[message.group]) == "string"
  return ours and m or nil
end
