--- Read a whole slot as it stands, open or closed, for the auditor, unless more is in it than asked. Writes nothing.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] most entries to read
--- ARGV[3] most bytes of messages, and of what is remembered, to read
--- Returns {"ok", now ms, then one list a part: its length, its values} (the parts: ms to live of the 14 keys, -1 = for ever,
---         -2 = no such key; due, lease, dead, fade, ready, line with scores; pending, flight, grave, facts, busy, memo with values)
---         {"large", now ms, entries, bytes} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = wrong(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
end
local scored, packed = { "due", "lease", "dead", "fade", "ready", "line" }, { "pending", "flight", "grave", "facts", "busy", "memo" }
local entries, bytes, most, room = 0, 0, tonumber(ARGV[2]), tonumber(ARGV[3])
for _, part in ipairs(scored) do
  entries = entries + redis.call("ZCARD", K[part])
end
for _, part in ipairs(packed) do
  entries = entries + redis.call("HLEN", K[part])
end
for _, part in ipairs(entries > most and {} or { "pending", "flight", "grave", "memo" }) do
  for _, name in ipairs(redis.call("HKEYS", K[part])) do
    bytes = bytes + redis.call("HSTRLEN", K[part], name)
  end
end
if entries > most or bytes > room then
  return { "large", now_ms, entries, bytes }
end

local reply = { "ok", now_ms }
local function tell_part(values)
  reply[#reply + 1] = #values
  for _, value in ipairs(values) do
    reply[#reply + 1] = value
  end
end
local lives = {}
for _, part in ipairs({ "due", "pending", "lease", "flight", "dead", "grave", "facts", "memo", "fade", "ready", "busy", "line" }) do
  lives[#lives + 1] = redis.call("PTTL", K[part])
end
for i = 0, 1 do
  lives[#lives + 1] = redis.call("PTTL", K.told[i])
end
tell_part(lives)
for _, part in ipairs(scored) do
  tell_part(redis.call("ZRANGE", K[part], 0, -1, "WITHSCORES"))
end
for _, part in ipairs(packed) do
  tell_part(redis.call("HGETALL", K[part]))
end
return reply
