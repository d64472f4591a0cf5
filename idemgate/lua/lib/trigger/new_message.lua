--- @include "lib/slot/message"
--- @include "lib/schedule/due_by_policy"
-- Prepare what new messages with the same options share: all but the accumulator. `serial` is that of the last trigger of
-- the call: a key has one new message in a call.
local function prepare_new(p, options, serial, now_ms)
  local due, why, flags, extension = options.at, reason.time, 1, ""
  if not due then
    due, why = due_by_policy(p, nil, nil, now_ms, 1, now_ms)
    flags = 0
  end
  if not options.plain and options.version .. options.priority .. options.group ~= "" then
    extension = cmsgpack.pack({ 0, "", options.version, options.priority, options.group, 0, "" })
    extension, flags = struct.pack(">I4", #extension) .. extension, flags + 2
  end
  options.due, options.score = due, string.format("%.0f", due)
  options.prefix = struct.pack(HEADER, flags, why, 1, now_ms, now_ms, due, serial) .. extension
end
