-- Return the earliest due time of the slot, ms, or nil.
local function earliest_due(K)
  return tonumber(redis.call("ZRANGE", K.scheduled, "0", "0", "WITHSCORES")[2])
end

-- Publish a hint to sleeping workers if `due` is earlier than everything else. The channel is the name of the
-- `scheduled` key. Without the hint the next poll finds the message.
local function publish_hint(K, head, due)
  if due and (not head or due < head) then
    redis.pcall("PUBLISH", K.scheduled, string.format("%.0f", due))
  end
end
