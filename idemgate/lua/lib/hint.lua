-- Tells sleeping workers when a message came to be due before everything else, on the channel named as the `due` key.
-- Hints only: a lost one costs a poll.
local function hint(K, head, due)
  if due and (not head or due < head) then
    redis.pcall("PUBLISH", K.due, string.format("%.0f", due))
  end
end
