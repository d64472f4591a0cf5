--- Decide about a key whose owner vanished: it is done (with a result, or none), or it may run again. A live claim is left alone.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = done, "0" = may run again
--- ARGV[3] retention, ms
--- ARGV[4] kind of result: "v" or "n"
--- ARGV[5] result
--- Returns {"ok", now ms} {"absent", now ms} (nothing to resolve) {"busy", now ms, lease left ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/record"
--- @include "lib/lease_left"
--- @include "lib/wake"
local key, retention = KEYS[1], tonumber(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end
if found.s ~= "p" then
  return { "absent", now_ms }
end
local left = lease_left(found.e, found.l, now_ms)
if left > 0 then
  return { "busy", now_ms, left, tonumber(found.n) }
end
-- The vanished owner keeps no say: "o" goes too, so whatever it still sends is answered "lost".
redis.call("HDEL", key, "e", "l", "w", "h", "o")
if ARGV[2] == "1" then
  redis.call("HDEL", key, "c")
  redis.call("HSET", key, "s", "1d", "t", digits(now_ms + retention), "k", ARGV[4], "r", ARGV[5], "a", digits(now_ms))
else
  redis.call("HSET", key, "s", "1r", "t", digits(now_ms + retention), "a", digits(now_ms))
end
redis.call("PEXPIRE", key, retention)
wake(key, found)
return { "ok", now_ms }
