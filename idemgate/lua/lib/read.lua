-- The record of one idempotency key, or nil and what is wrong with the key. A missing key is a record that says "absent".
local function read(key)
  local packed = redis.pcall("GET", key)
  if not packed then
    return { 1, "absent", "", 0, 0, 0, 0, 0, "", "", "" }
  end
  if packed.err then
    return nil, "holds another type than a string"
  end
  -- An array of 11 or 14, layout 1, one of our states: what begins otherwise is somebody else's, and not for the unpacker.
  if string.find(packed, "^[\155\158]\1\161[pdfr]") then
    local whole, found = pcall(cmsgpack.unpack, packed)
    local counted = whole
    for place = 4, whole and #found or 0 do
      -- Numbers are the places from 4 to 8, and from 12 on, where there are any.
      local expected = (place < 9 or place > 11) and "number" or "string"
      counted = counted and type(found[place]) == expected
    end
    if counted and (#found == 14 or #found == 11 and found[2] ~= "p") then
      return found
    end
  end
  return nil, "holds a record of another layout"
end
