-- Tells whoever waits for this record to look again. Hints only: a lost one costs a poll.
local function wake(key, waited, owner)
  if waited == 1 then
    redis.pcall("PUBLISH", key, owner)
  end
end
