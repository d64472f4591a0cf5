--- @include "lib/message"
--- @include "lib/delivery"
--- @include "lib/sound"
-- Looks at messages and deliveries of which only the rest is wanted: of large ones the text that makes them large is not made, which
-- costs half.
-- A message as `places` reads it, but for its accumulator, which is left out; or nil, also where that is short, or no text.
local function lean(packed)
  local first = type(packed) == "string" and string.byte(packed)
  if not first or first <= 0x90 + message.acc or first >= 0xa0 then
    return nil
  end
  local before = { pcall(cmsgpack.unpack_limit, packed, message.acc - 1, 1) }
  local from = before[1] and before[2] > 0 and before[2] + 1
  local kind = from and string.byte(packed, from)
  local size = kind == 0xda and #packed >= from + 2 and 3 + struct.unpack(">I2", packed, from + 1)
    or kind == 0xdb and #packed >= from + 4 and 5 + struct.unpack(">I4", packed, from + 1)
  local behind = size and from + size <= #packed and { pcall(cmsgpack.unpack_limit, packed, first - 0x90 - message.acc, from + size - 1) }
  if not behind or not behind[1] or behind[2] ~= -1 then
    return nil
  end
  local found = { unpack(before, 3) }
  found[message.acc] = ""
  for i = 3, #behind do
    found[message.acc + i - 2] = behind[i]
  end
  return found
end
local function lean_message(packed)
  if type(packed) ~= "string" or #packed <= 1024 then
    return sound_message(packed)
  end
  local m = lean(packed)
  local whole, found = pcall(is_message, m)
  return whole and found or sound_message(packed)
end
-- All but the message, of which only its length is looked at: behind `at` stands one text, and nothing else.
local function is_text(packed, at)
  local kind, size = string.byte(packed, at + 1), #packed - at
  return kind == 0xda and size == 3 + struct.unpack(">I2", packed, at + 2) or kind == 0xdb and size == 5 + struct.unpack(">I4", packed, at + 2)
end
local function fronted(packed, at, ...)
  return is_text(packed, at) and is_delivery({ ... })
end
local function front_of(packed)
  return string.byte(packed) == 0x97 and fronted(packed, cmsgpack.unpack_limit(packed, delivery.message - 1, 1))
end
local function lean_delivery(packed)
  if #packed <= 1024 then
    return sound_delivery(packed)
  end
  local whole, d = pcall(front_of, packed)
  return whole and d or sound_delivery(packed)
end
