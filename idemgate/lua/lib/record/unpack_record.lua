-- Return the fields of a stored record as separate values, which is cheaper than a table: state, kind, owner, fence,
-- attempts, taken, ends, since, print, data, lease, held, waited. A missing key (false) returns state "absent". A
-- foreign value returns nil and the problem.
local function unpack_record(stored)
  if not stored then
    return "absent", "", "", 0, 0, 0, 0, 0, "", ""
  end
  if stored.err then
    return nil, "holds another type than a string"
  end
  local code, length = string.byte(stored), #stored
  if code == 193 then
    local whole, letter, fence, ends, since, attempts, taken, lease, flags, owner, print, at =
      pcall(struct.unpack, ">xc1I7I6I6I4I4I6BBc0Bc0", stored)
    if whole and at <= length + 1 then
      if letter == "p" or letter == "r" then
        return letter, "", owner, fence, attempts, taken, ends, since, print, at > length and "" or string.sub(stored, at), lease, flags % 2,
          (flags - flags % 2) / 2
      elseif letter == "v" or letter == "n" or letter == "e" then
        return letter == "e" and "f" or "d", letter, owner, fence, attempts, taken, ends, since, print, string.sub(stored, at)
      end
    end
  elseif code and code >= 248 and length >= 12 then
    local fence, after, minutes, at = struct.unpack(">xI7I2I2", stored)
    local since, kind, owner, print = (fence - fence % 1000) / 1000 + after, "v", "", ""
    if code >= 250 then
      kind = (code == 252 or code == 253) and "e" or "n"
    end
    if code >= 254 then
      owner, at = string.sub(stored, at, at + 15), at + 16
    end
    if code % 2 == 1 then
      print, at = string.sub(stored, at, at + 15), at + 16
    end
    if at <= length + 1 then
      return kind == "e" and "f" or "d", kind, owner, fence, 1, 0, since + minutes * 60000, since, print, string.sub(stored, at)
    end
  end
  return nil, "holds a record of another layout"
end
