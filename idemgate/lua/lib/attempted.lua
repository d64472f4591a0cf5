--- @include "lib/message"
-- Counts an attempt of a message, and packs it. `packed` is what it was unpacked from, if nothing else has changed: then one byte of it
-- is another now, which costs half of packing it anew. (Of a large one it makes two texts, where packing makes one.)
local function attempted(m, packed)
  local before = m[message.attempts]
  m[message.attempts] = before + 1
  local at = packed and #packed < 1024 and cmsgpack.unpack_limit(packed, message.attempts - 1, 1)
  if at and before < 127 and string.byte(packed, at + 1) == before then
    return string.sub(packed, 1, at) .. string.char(before + 1) .. string.sub(packed, at + 2)
  end
  return cmsgpack.pack(m)
end
