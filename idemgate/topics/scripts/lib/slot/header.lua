-- A message is a header, an extension that only some have and the accumulator of the merge policy. It is written when a
-- trigger creates or merges it. Taking it does not change it.
--   header     31 bytes, big-endian: flags (1), reason (1), count (5), first, last, due, serial (6 each). Times are ms.
--              Flags: 1 the caller set the time, 2 there is an extension. The reason names what made the message due. The
--              serial numbers its newest trigger within the slot, so two messages of one key differ.
--   extension  its length (4), then a packed array: attempts that ended, failure of the last one, version, priority, group,
--              partial retries, earlier attempts, rank, traces. "" stands for none. The
--              earlier attempts, as text, ended before its newest trigger (topics/lib/payloads). The rank is the text by which the
--              message last waited for its group in a topic with priorities. The traces are those of its triggers
--              (topics/lib/join_traces). Both are absent for none; a message with traces and no rank has the rank "".
--   accumulator  the rest (topics/lib/payloads)
local HEADER, HEADER_SIZE = ">BBI5I6I6I6I6", 31
local reason = { now = 0, window = 1, quiet = 2, max_delay = 3, max_size = 4, leading = 5, time = 6, flush = 7, retry = 8, redrive = 9 }

-- Return the flags, count, due time and serial of a message, or nil if its header is corrupt.
local function read_header(packed)
  if not packed or #packed < HEADER_SIZE then
    return nil
  end
  local flags, why, count, _, _, due, serial = struct.unpack(HEADER, packed)
  if flags < 4 and why <= reason.redrive then
    return flags, count, due, serial
  end
end
