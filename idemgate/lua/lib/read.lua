-- The record of one idempotency key (lib/record), or nil and what is wrong with the key. A missing key is a record that says "absent".
local function read(key)
  local stored = redis.pcall("GET", key)
  if not stored then
    return { state = "absent", kind = "", owner = "", fence = 0, attempts = 0, taken = 0, ends = 0, since = 0, print = "", data = "" }
  end
  if stored.err then
    return nil, "holds another type than a string"
  end
  local code, whole, letter, fence, ends, since, attempts, taken, lease, flags, owner, print, at = string.byte(stored), true
  if code and code >= 248 and #stored >= 12 then
    local after, minutes
    fence, after, minutes, at = struct.unpack(">xI7I2I2", stored)
    letter, owner, print, attempts, taken = string.sub("vvnneenn", code - 247, code - 247), "", "", 1, 0
    since = math.floor(fence / 1000) + after
    ends = since + minutes * 60000
    if code >= 254 then
      owner, at = string.sub(stored, at, at + 15), at + 16
    end
    if code % 2 == 1 then
      print, at = string.sub(stored, at, at + 15), at + 16
    end
  elseif code == 193 then
    whole, letter, fence, ends, since, attempts, taken, lease, flags, owner, print, at =
      pcall(struct.unpack, ">xc1I7I6I6I4I4I6BBc0Bc0", stored)
  end
  if at and at <= #stored + 1 and string.find("prvne", letter, 1, true) then
    local kind = letter ~= "p" and letter ~= "r" and letter or ""
    return {
      state = kind == "" and letter or kind == "e" and "f" or "d", kind = kind, owner = owner, fence = fence, attempts = attempts,
      taken = taken, ends = ends, since = since, print = print, data = string.sub(stored, at), lease = lease,
      held = flags and flags % 2, waited = flags and (flags - flags % 2) / 2,
    }
  end
  return nil, "holds a record of another layout"
end
