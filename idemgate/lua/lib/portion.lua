--- @include "lib/most_bytes"
-- How many of these fields of a hash, from the first on, go into `room` bytes with their names; into `most_bytes`, untouched, goes
-- any one. Returns that number, and the room behind them: none, if there are more.
local function portion(target, names, room)
  for i, name in ipairs(names) do
    local size = #name + redis.call("HSTRLEN", target, name)
    if size > room and room < most_bytes then
      return i - 1, 0
    end
    room = room - size
  end
  return #names, room
end
