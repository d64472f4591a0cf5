--- Return the whole content of a slot for the auditor, open or closed, unless it exceeds the given limits.
--- Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] maximum number of entries
--- ARGV[3] maximum bytes of messages and dedup facts
--- Returns {"ok", now ms, then one list a part: its length, its values} (the parts: ms to live of the 15 keys, -1 = no expiry,
---         -2 = no such key; scheduled, leases, dead, dedup:expiry, ready, group:waiting with scores; messages,
---         next, inflight, dead:data, meta, group:active, dedup with values)
---         {"large", now ms, entries, bytes} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
end
local scored, packed = { "scheduled", "leases", "dead", "dedup_expiry", "ready", "group_waiting" }, { "messages", "next", "inflight", "dead_data", "meta", "group_active", "dedup" }
local entries, bytes, most, room = 0, 0, tonumber(ARGV[2]), tonumber(ARGV[3])
for _, part in ipairs(scored) do
  entries = entries + redis.call("ZCARD", K[part])
end
for _, part in ipairs(packed) do
  entries = entries + redis.call("HLEN", K[part])
end
for _, part in ipairs(entries > most and {} or { "messages", "next", "inflight", "dead_data", "dedup" }) do
  for _, name in ipairs(redis.call("HKEYS", K[part])) do
    bytes = bytes + redis.call("HSTRLEN", K[part], name)
  end
end
if entries > most or bytes > room then
  return { "large", now_ms, entries, bytes }
end

local reply = { "ok", now_ms }
local function append_part(values)
  reply[#reply + 1] = #values
  for _, value in ipairs(values) do
    reply[#reply + 1] = value
  end
end
local lives = {}
for _, part in ipairs({ "scheduled", "messages", "next", "leases", "inflight", "dead", "dead_data", "meta", "dedup", "dedup_expiry", "ready", "group_active", "group_waiting" }) do
  lives[#lives + 1] = redis.call("PTTL", K[part])
end
for i = 0, 1 do
  lives[#lives + 1] = redis.call("PTTL", K.replies[i])
end
append_part(lives)
for _, part in ipairs(scored) do
  append_part(redis.call("ZRANGE", K[part], 0, -1, "WITHSCORES"))
end
for _, part in ipairs(packed) do
  append_part(redis.call("HGETALL", K[part]))
end
return reply
