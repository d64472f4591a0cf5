-- Tells whoever waits for this record to look again. Hints only: a lost one costs a poll.
local function wake(key, r)
  if r.waited == 1 then
    redis.pcall("PUBLISH", key, r.owner)
  end
end
