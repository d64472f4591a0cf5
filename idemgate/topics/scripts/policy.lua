--- Return the stored policy of a topic. Writes nothing.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- Returns {"ok", now ms, policy} {"absent", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local stored = redis.pcall("HGET", KEYS[1], ARGV[2])
if type(stored) == "table" then
  --- @include "lib/raise_refusal"
  raise_refusal(stored.err)
  return { "foreign", now_ms, "holds another type than a hash" }
end
if not stored then
  return { "absent", now_ms }
end
return { "ok", now_ms, stored }
