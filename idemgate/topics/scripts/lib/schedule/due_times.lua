--- @include "lib/now"
--- @include "topics/lib/slot/header"
-- Parse a caller's time into ms since the epoch: "a" and an instant, "d" and a delay. Return nil for "", which leaves
-- it to the policy. A past instant becomes now.
local function parse_time(text, now_ms)
  if text == "" then
    return nil
  end
  local number = tonumber(string.sub(text, 2))
  if string.sub(text, 1, 1) == "d" then
    return now_ms + number
  end
  return math.max(number, now_ms)
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

-- Return what new messages with the same time share: the header, the due time as number and as text. `at` is the
-- caller's time, ms, or nil. `serial` is that of a trigger of the call: messages of one call that share a header share
-- its serial.
local function prepare_new(p, at, serial, now_ms, extended)
  local due, why = at, reason.time
  if not at then
    due, why = due_by_policy(p, nil, nil, now_ms, 1, now_ms)
  end
  local flags = (at and 1 or 0) + (extended and 2 or 0)
  return struct.pack(HEADER, flags, why, 1, now_ms, now_ms, due, serial), due, digits(due)
end
