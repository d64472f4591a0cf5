--- @include "topics/lib/slot/header"
-- Decode a message to a table. `acc` is the packed accumulator. Raises an error for a message that is cut short.
local function decode_message(packed)
  local flags, why, count, first, last, due, serial, at = struct.unpack(HEADER, packed)
  local m = {
    pinned = flags % 2, why = why, count = count, first = first, last = last, due = due, serial = serial,
    attempts = 0, failure = "", version = "", priority = "", group = "", splits = 0, earlier = "", acc = "",
  }
  if flags > 1 then
    local size, from = struct.unpack(">I4", packed, at)
    at = from + size
    m.attempts, m.failure, m.version, m.priority, m.group, m.splits, m.earlier, m.rank, m.traces = unpack(cmsgpack.unpack(string.sub(packed, from, at - 1)), 1, 9)
  end
  m.acc = string.sub(packed, at)
  return m
end

-- Encode the values of an extension (topics/lib/slot/header).
local function encode_extension(values)
  local packed = cmsgpack.pack(values)
  return struct.pack(">I4", #packed) .. packed
end

-- Encode a message. Its accumulator may be packed or a table.
local function encode_message(m)
  local acc = type(m.acc) == "table" and cmsgpack.pack(m.acc) or m.acc
  local plain = m.attempts == 0 and m.splits == 0 and not (m.rank or m.traces) and m.failure .. m.version .. m.priority .. m.group .. m.earlier == ""
  local header = struct.pack(HEADER, m.pinned + (plain and 0 or 2), m.why, m.count, m.first, m.last, m.due, m.serial)
  if plain then
    return header .. acc
  end
  return header .. encode_extension({ m.attempts, m.failure, m.version, m.priority, m.group, m.splits, m.earlier, m.rank or m.traces and "", m.traces }) .. acc
end

-- Return the header of a message with another serial.
local function with_serial(header, serial)
  return string.sub(header, 1, 25) .. struct.pack(">I6", serial)
end

-- Return a packed message with another due time. The rest is copied.
local function with_due(packed, due, why)
  return string.sub(packed, 1, 1) .. struct.pack("B", why) .. string.sub(packed, 3, 19) .. struct.pack(">I6", due) .. string.sub(packed, 26)
end
