--- Return the newest acts of operators. Writes nothing.
--- KEYS[1] acts
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] number of acts
--- Returns {"ok", now ms, then the acts, newest first: time, ms, as >I8; id, 16 bytes; the act}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local acts = redis.pcall("LRANGE", KEYS[1], 0, tonumber(ARGV[2]) - 1)
if acts.err then
  raise_refusal(acts.err)
  return { "foreign", now_ms, "holds another type than a list" }
end
return { "ok", now_ms, unpack(acts) }
