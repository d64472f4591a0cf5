--- @include "lib/slot/message"
-- Return the due time of a message by its topic's policy, ms, and the reason. `m` already includes its new trigger;
-- `fresh` is true for its first.
local function due_by_policy(p, m, fresh, now_ms)
  local due, why = m[message.due], m[message.why]
  if fresh then
    due, why = now_ms + (p.window or 0), p.leading and "leading" or p.window and "window" or "now"
    if p.leading then
      due = now_ms
    end
  end
  if p.quiet and not p.leading then
    due, why = now_ms + p.quiet, "quiet"
    if p.max_delay and m[message.first] + p.max_delay < due then
      due, why = m[message.first] + p.max_delay, "max_delay"
    end
  end
  if p.max_size and m[message.count] >= p.max_size and due > now_ms then
    due, why = now_ms, "max_size"
  end
  return due, why
end
