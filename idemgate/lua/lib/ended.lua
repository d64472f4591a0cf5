--- @include "lib/record"
-- The record in a state in which nothing runs: what only matters in progress is left out.
local function ended(r, state, ends, now_ms, data, kind)
  return { 1, state, r[record.owner], r[record.fence], r[record.attempts], ends, now_ms, r[record.taken], r[record.print], data, kind }
end
