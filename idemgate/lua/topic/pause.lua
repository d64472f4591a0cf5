--- Stop handing out what is due, or go on. What is in flight is not touched.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = pause, "0" = resume
--- Returns {"ok", now ms, 1 if that changed anything, else 0} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
if ARGV[2] == "1" then
  redis.call("HSETNX", K.facts, "v", "1")
  return { "ok", now_ms, redis.call("HSETNX", K.facts, "paused", string.format("%.0f", now_ms)) }
end
local changed = redis.call("HDEL", K.facts, "paused")
redis.call("PUBLISH", K.due, string.format("%.0f", now_ms))
return { "ok", now_ms, changed }
