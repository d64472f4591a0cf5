--- @include "lib/slot/header"
-- Parse a caller's time into ms since the epoch: "a" and an instant, "d" and a delay. Return nil for "", which leaves
-- it to the policy. A past instant becomes now.
local function parse_time(text, now_ms)
  local number = tonumber(string.sub(text, 2))
  if string.sub(text, 1, 1) == "d" then
    return now_ms + number
  end
  return number and math.max(number, now_ms)
end

-- Return the due time of a message by its topic's policy, ms, and the reason. `first` and `count` already include its
-- new trigger. `due` is its former due time, or nil for a new message.
local function due_by_policy(p, due, why, first, count, now_ms)
  if not due then
    due, why = now_ms + (p.window or 0), p.leading and reason.leading or p.window and reason.window or reason.now
    if p.leading then
      due = now_ms
    end
  end
  if p.quiet and not p.leading then
    due, why = now_ms + p.quiet, reason.quiet
    if p.max_delay and first + p.max_delay < due then
      due, why = first + p.max_delay, reason.max_delay
    end
  end
  if p.max_size and count >= p.max_size and due > now_ms then
    due, why = now_ms, reason.max_size
  end
  return due, why
end




