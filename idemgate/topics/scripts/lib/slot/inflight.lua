-- Deliveries in flight are the members of `leases`. The score of each is the start of its lease, us: the lease ends `term`
-- ms (a field of meta) after the ms in which it starts. `term` changes only while nothing is in flight.
-- Most deliveries are plain: one trigger at its own time, without a group, not cancelled, with a lease of `term` ms that
-- was not extended. The score of these is also their fencing token, and the slot stores nothing else about them. All
-- deliveries of one take have the same token.
-- Each other delivery has an entry in `inflight`: its fencing token as decimal text. Unless it is one trigger at its own
-- time, without a group and not cancelled, the due time in ms, 1 if cancelled, the number of triggers and the group follow,
-- with spaces between. So an ack need not read the message.
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
