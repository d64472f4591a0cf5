--- @include "lib/slot/message"
--- @include "lib/slot/delivery"
--- @include "lib/validate/stored"
-- Validators for callers that do not need the large string inside. Not creating that string costs half. Unpack a
-- message without its accumulator. Return nil for a corrupt one, and for one whose accumulator is short or not a
-- string.
local function unpack_lean(packed)
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
local function validate_lean_message(packed)
  if type(packed) ~= "string" or #packed <= 1024 then
    return validate_message(packed)
  end
  local m = unpack_lean(packed)
  local whole, found = pcall(check_message, m)
  return whole and found or validate_message(packed)
end
-- Check a delivery by its front part. Of the message, only the length is checked: behind `at` there is one string and
-- nothing else.
local function is_text(packed, at)
  local kind, size = string.byte(packed, at + 1), #packed - at
  return kind == 0xda and size == 3 + struct.unpack(">I2", packed, at + 2) or kind == 0xdb and size == 5 + struct.unpack(">I4", packed, at + 2)
end
local function check_front(packed, at, ...)
  return is_text(packed, at) and check_delivery({ ... })
end
local function unpack_front(packed)
  return string.byte(packed) == 0x97 and check_front(packed, cmsgpack.unpack_limit(packed, delivery.message - 1, 1))
end
local function validate_lean_delivery(packed)
  if #packed <= 1024 then
    return validate_delivery(packed)
  end
  local whole, d = pcall(unpack_front, packed)
  return whole and d or validate_delivery(packed)
end
