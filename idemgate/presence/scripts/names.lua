--- Return the names of processes, those that reported last first. Writes nothing.
--- KEYS[1] presence:names
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then for each: what the ids of its requests begin with, 8 bytes, and its name; when it was stored, ms}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found = redis.pcall("ZREVRANGE", KEYS[1], 0, 1000 - 1, "WITHSCORES")
if found.err then
  raise_refusal(found.err)
  return { "foreign", now_ms, "holds another type than a sorted set" }
end
return { "ok", now_ms, unpack(found) }
