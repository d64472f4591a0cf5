--- How long somebody's key still lives. Looking at it makes the server remove what has expired, and say so. Writes nothing.
--- KEYS[1] the key, of any type; it is none of ours
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, left ms}; left is -1 for a key that never expires, -2 for none
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
return { "ok", now_ms, redis.call("PTTL", KEYS[1]) }
