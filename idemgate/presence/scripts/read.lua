--- Return the reports of processes. Writes nothing.
--- KEYS[n] presence:<id>, at most 100
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then the report of each key; false = none, it has expired}
--- @include "lib/now"
return { "ok", math.floor(now(ARGV[1]) / 1000), unpack(redis.call("MGET", unpack(KEYS))) }
