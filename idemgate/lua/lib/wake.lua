--- @include "lib/record"
-- Tells whoever waits for this record to look again. Hints only: a lost one costs a poll.
local function wake(key, r)
  if r[record.waited] == 1 then
    redis.pcall("PUBLISH", key, r[record.owner])
  end
end
