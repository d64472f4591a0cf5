--- @include "lib/digits"
--- @include "lib/slot/header"
--- @include "lib/schedule/due_times"
-- Return what new messages with the same time share: all bytes but the accumulator, the due time as number and as text. `at` is
-- the caller's time, ms, or nil. `serial` is that of the last trigger of the call, because a key has one new message in a call.
local function prepare_new(p, at, serial, now_ms, extension)
  local due, why = at, reason.time
  if not at then
    due, why = due_by_policy(p, nil, nil, now_ms, 1, now_ms)
  end
  local flags = (at and 1 or 0) + (extension and 2 or 0)
  return struct.pack(HEADER, flags, why, 1, now_ms, now_ms, due, serial) .. (extension or ""), due, digits(due)
end
