--- Return the time to live of a user's key. Reading it makes the server expire the key and publish the event.
--- Writes nothing.
--- KEYS[1] the key, of any type; idemgate does not own it
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, time to live ms}; -1 for a key that never expires, -2 for a missing one
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
return { "ok", now_ms, redis.call("PTTL", KEYS[1]) }
