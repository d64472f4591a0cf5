--- Stop handing out what is due, or go on. What is in flight is not touched.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] "1" = pause, "0" = resume
--- Returns {"ok", now ms, 1 if that changed anything, else 0} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/told"
--- @include "lib/tell"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end
local text = string.format("%.0f", now_ms)
-- A write that frees memory comes first: a server that has none left refuses a script that begins with any other.
redis.call("HDEL", K.facts, "")
if ARGV[3] == "1" then
  redis.call("HSETNX", K.facts, "v", "1")
  return tell(K, ARGV[2], now_ms, { "ok", now_ms, redis.call("HSETNX", K.facts, "paused", text) })
end
local changed = redis.call("HDEL", K.facts, "paused")
redis.pcall("PUBLISH", K.due, text)
return tell(K, ARGV[2], now_ms, { "ok", now_ms, changed })
