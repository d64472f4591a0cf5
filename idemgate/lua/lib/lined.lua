--- @include "lib/message"
--- @include "lib/sortable"
-- A message as a member of the line: its group, its rank among those with priorities, due time, key; by name, the first to go first.
local function lined(key, m)
  return m[message.group] .. "\0" .. (m[message.rank] or "") .. "\0" .. sortable(m[message.due], key)
end
