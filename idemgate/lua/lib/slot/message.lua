-- A message is a header, an extension that only some have and the accumulator of the merge policy. It is written when a
-- trigger creates or merges it. Taking it does not change it.
--   header     31 bytes, big-endian: flags (1), reason (1), count (5), first, last, due, serial (6 each). Times are ms.
--              Flags: 1 the caller set the time, 2 there is an extension. The reason names what made the message due. The
--              serial numbers its newest trigger within the slot, so two messages of one key differ.
--   extension  its length (4), then a packed array: attempts that ended, failure of the last one, version, priority, group,
--              partial retries, trace contexts (reserved), rank. "" stands for none. The rank, absent for none, is the text
--              by which the message last waited for its group in a topic with priorities.
--   accumulator  the rest (lib/merge/payloads)
local HEADER, HEADER_SIZE = ">BBI5I6I6I6I6", 31
local reason = { now = 0, window = 1, quiet = 2, max_delay = 3, max_size = 4, leading = 5, time = 6, flush = 7, retry = 8, redrive = 9 }

-- Return true for text that begins with a header.
local function is_message(packed)
  return #packed >= HEADER_SIZE and string.byte(packed) < 4 and string.byte(packed, 2) < 10
end
-- Return the flags, count and due time of a message, or nil if its header is corrupt.
local function read_header(packed)
  if packed and is_message(packed) then
    local flags, _, count, _, _, due = struct.unpack(HEADER, packed)
    return flags, count, due
  end
end
local function unpack_extension(m, attempts, failure, version, priority, group, splits, traces, rank)
  m.attempts, m.failure, m.version, m.priority, m.group = attempts, failure, version, priority, group
  m.splits, m.traces, m.rank = splits, traces, rank
end
-- Decode a message to a table. `acc` is the packed accumulator. Raises an error for a message that is cut short.
local function decode_message(packed)
  local flags, why, count, first, last, due, serial, at = struct.unpack(HEADER, packed)
  local m = {
    pinned = flags % 2, why = why, count = count, first = first, last = last, due = due, serial = serial,
    attempts = 0, failure = "", version = "", priority = "", group = "", splits = 0, traces = "", acc = "",
  }
  if flags > 1 then
    local size, from = struct.unpack(">I4", packed, at)
    at = from + size
    unpack_extension(m, unpack(cmsgpack.unpack(string.sub(packed, from, at - 1)), 1, 8))
  end
  m.acc = string.sub(packed, at)
  return m
end

-- Encode a message. Its accumulator may be packed or a table.
local function encode_message(m)
  local acc = type(m.acc) == "table" and cmsgpack.pack(m.acc) or m.acc
  local plain = m.attempts == 0 and m.splits == 0 and not m.rank and m.failure .. m.version .. m.priority .. m.group .. m.traces == ""
  local header = struct.pack(HEADER, m.pinned + (plain and 0 or 2), m.why, m.count, m.first, m.last, m.due, m.serial)
  if plain then
    return header .. acc
  end
  local extension = cmsgpack.pack({ m.attempts, m.failure, m.version, m.priority, m.group, m.splits, m.traces, m.rank })
  return header .. struct.pack(">I4", #extension) .. extension .. acc
end

-- Return a packed message with another due time. The rest is copied.
local function with_due(packed, due, why)
  return string.sub(packed, 1, 1) .. struct.pack("B", why) .. string.sub(packed, 3, 19) .. struct.pack(">I6", due) .. string.sub(packed, 26)
end
