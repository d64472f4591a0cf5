-- What stands before a text of that many bytes in a packed array; of each length it is made once. Who packs many arrays that are like
-- each other joins them of texts, which costs half.
local header = {}
function header.of(size)
  local found = header[size]
  if not found then
    found = string.sub(cmsgpack.pack(string.rep("x", size)), 1, -size - 1)
    header[size] = found
  end
  return found
end
