--- @include "lib/most_bytes"
--- @include "lib/bulky"
-- How many of these keys, from the first on, go into `room` bytes with what is stored of them in one part of the slot, or two (where two
-- become one value by value, each value counts again); into `most_bytes`, untouched, goes any one. Returns that number, and the room behind them: none, if there are more.
-- Lengths are asked in slots that have held something large (lib/weighed), and where each byte counts for many (lib/bulky): elsewhere all
-- of a call goes into that room by its number.
local function portion(K, p, names, room, part, other)
  if #names == 0 or not bulky.is(p) and redis.call("HEXISTS", K.facts, "large") == 0 then
    return #names, room
  end
  for i, name in ipairs(names) do
    local size, met = redis.call("HSTRLEN", K[part], name), other and redis.call("HSTRLEN", K[other], name) or 0
    size = #name + bulky.bytes(p, size + met) * (bulky.is(p) and size > 0 and met > 0 and 2 or 1)
    if size > room and room < most_bytes then
      return i - 1, 0
    end
    room = room - size
  end
  return #names, room
end
