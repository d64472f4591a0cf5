-- Return the MessagePack header of a string of `size` bytes, cached per length. Concatenating packed parts costs half
-- of packing similar arrays.
local string_header = {}
function string_header.of(size)
  local found = string_header[size]
  if not found then
    found = string.sub(cmsgpack.pack(string.rep("x", size)), 1, -size - 1)
    string_header[size] = found
  end
  return found
end
