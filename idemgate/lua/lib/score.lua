--- @include "lib/message"
-- The rank of a message that is due, of a topic with priorities: the lower, the sooner.
local function score(p, m)
  local points = tonumber(m[message.priority]) or 0
  return p.boost and m[message.due] - points * p.boost or -points
end
