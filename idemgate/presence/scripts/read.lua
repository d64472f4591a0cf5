--- Return the reports of processes. Writes nothing.
--- KEYS[1..] presence:<id>, at most 100
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then the report of each key; false = none, it has expired}
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
return { "ok", now_ms, unpack(redis.call("MGET", unpack(KEYS))) }
