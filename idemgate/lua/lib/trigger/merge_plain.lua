--- @include "lib/slot/message"
--- @include "lib/schedule/due_by_policy"
-- Merge a trigger without options into a packed message, of which only the header is decoded. Return the due time, or nil
-- if the message needs merge_trigger: it has an extension, a time of its own, or another scheduled time. `merge` is
-- that of lib/merge/payloads, or nil where payloads are not computed ("last", "first").
local function merge_plain(call, key, acc, serial, merge)
  local p, packed, stands, now_ms = call.p, call.pending[key], call.standing[key], call.now_ms
  local flags, why, count, first, last, due = struct.unpack(HEADER, packed)
  if flags ~= 0 or why == reason.retry or stands ~= nil and stands ~= due or stands == nil and not call.trusted then
    return nil
  end
  local before = due
  count, first, last = count + 1, math.min(first, now_ms), math.max(last, now_ms)
  if p.quiet or p.max_size then
    due, why = due_by_policy(p, due, why, first, count, now_ms)
  end
  local header = struct.pack(HEADER, 0, why, count, first, last, due, serial)
  if merge then
    local a = call.accs[key] or cmsgpack.unpack(string.sub(packed, HEADER_SIZE + 1))
    call.accs[key], call.pending[key] = merge(p.merge, a, cmsgpack.unpack(acc)), header
  else
    call.pending[key] = header .. (p.merge.op == "last" and acc or string.sub(packed, HEADER_SIZE + 1))
  end
  call.changed[key] = true
  if due ~= before and not call.flying[key] then
    call.scheduled[call.times + 1], call.scheduled[call.times + 2] = due, key
    call.times, call.standing[key], call.shifted = call.times + 2, due, true
  end
  return due
end
