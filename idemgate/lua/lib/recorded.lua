--- @include "lib/record"
-- A record as it is stored (lib/record), from the table that lib/read gives.
local function recorded(r)
  return record(r.state, r.kind, r.owner, r.fence, r.attempts, r.taken, r.ends, r.since, r.print, r.data, r.lease, r.held, r.waited)
end
