--- @include "lib/slot/message"
--- @include "lib/schedule/due_by_policy"
-- Merge a trigger without options into a packed message and decode only its header. Return the due time. Return nil if the
-- message needs merge_trigger: it has an extension, a time set by the caller or another scheduled time. `merge` comes
-- from lib/merge/payloads. It is nil for the policies `last` and `first`.
local function merge_plain(call, key, acc, serial, merge)
  local p, packed, score, now_ms = call.p, call.pending[key], call.scores[key], call.now_ms
  local flags, why, count, first, last, due = struct.unpack(HEADER, packed)
  if flags ~= 0 or why == reason.retry or score ~= nil and score ~= due or score == nil and not call.headers_current then
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
  if due ~= before and not call.in_flight[key] then
    call.scheduled[call.scheduled_size + 1], call.scheduled[call.scheduled_size + 2] = due, key
    call.scheduled_size, call.scores[key], call.shifted = call.scheduled_size + 2, due, true
  end
  return due
end
