-- Return the earliest due time of the slot, ms, or nil.
local function earliest_due(K)
  return tonumber(redis.call("ZRANGE", K.scheduled, "0", "0", "WITHSCORES")[2])
end

-- Publish a hint to sleeping workers if `due` is earlier than everything else. The channel is the name of the `due`
-- key. A lost hint costs one poll.
local function publish_hint(K, head, due)
  if due and (not head or due < head) then
    redis.pcall("PUBLISH", K.scheduled, string.format("%.0f", due))
  end
end

-- Publish a hint that a slot at its in-flight limit may have room again: no worker polls at that moment.
local function notify_reopened(K, p, due, now_ms)
  if p.limited and due > 0 and due <= now_ms then
    redis.pcall("PUBLISH", K.scheduled, string.format("%.0f", now_ms))
  end
end
