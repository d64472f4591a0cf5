-- Tells whoever waits for this record to look again. Hints only: a lost one costs a poll.
local function wake(key, found)
  if found.w then
    redis.call("PUBLISH", key, found.o)
  end
end
