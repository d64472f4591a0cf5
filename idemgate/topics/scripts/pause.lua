--- Pause or resume the deliveries of a slot. Deliveries in flight continue. A second pause leaves the record of the first.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] who pauses it and why, packed; "" = resume
--- Returns {"ok", now ms, 1 if that changed anything, else 0} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end
local text = string.format("%.0f", now_ms)
-- Start with HDEL: a server without memory refuses a script whose first write may allocate.
redis.call("HDEL", K.meta, "")
if ARGV[3] ~= "" then
  redis.call("HSETNX", K.meta, "v", "3")
  return remember_reply(K, ARGV[2], now_ms, { "ok", now_ms, redis.call("HSETNX", K.meta, "paused", text .. " " .. ARGV[3]) })
end
local changed = redis.call("HDEL", K.meta, "paused")
redis.pcall("PUBLISH", K.scheduled, text)
return remember_reply(K, ARGV[2], now_ms, { "ok", now_ms, changed })
