-- An entry of a delivery in flight: its fencing token as decimal text. The entry is longer unless the delivery is one
-- trigger at its own time, without a group, and not cancelled. Then it is the token, due time in ms, 1 if cancelled,
-- number of triggers and group with spaces between, so that an ack need not read the message. All deliveries of one take
-- have the same token. Most have the same entry.
local function format_entry(token, due, cancelled, count, group)
  return string.format("%s %.0f %s %.0f ", token, due, cancelled and "1" or "0", count) .. group
end

-- Parse an entry into a table, or return nil if it is corrupt. `due` is nil if the message tells it.
local function parse_entry(entry)
  local token, due, cancelled, count, group = string.match(entry, "^(%d+) (%-?%d+) ([01]) (%d+) (.*)$")
  if token then
    return { token = token, due = tonumber(due), cancelled = cancelled == "1", count = tonumber(count), group = group }
  end
  return string.find(entry, "^%d+$") and { token = entry, cancelled = false, count = 1, group = "" } or nil
end
