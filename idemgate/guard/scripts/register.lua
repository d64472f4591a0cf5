--- Store the retention of a scope if it is the longest so far, and return the longest.
--- KEYS[1] scopes
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] scope
--- ARGV[3] retention, ms; 0 = only return the longest
--- ARGV[4] number of scopes beyond which no other one is stored
--- Returns {"ok", now ms, longest retention, ms (0 = unknown scope)} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/problems"
local key, retention = KEYS[1], tonumber(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local stored = redis.pcall("HGET", key, ARGV[2])
if type(stored) == "table" then
  --- @include "lib/raise_refusal"
  raise_refusal(stored.err)
  return { "foreign", now_ms, "holds another type than a hash" }
end
local longest = tonumber(stored or 0)
if not longest or corrupt_number(key, ARGV[2], longest) then
  return { "foreign", now_ms, corrupt_entry(key, ARGV[2]) }
end
if retention > longest then
  if stored or redis.call("HLEN", key) < tonumber(ARGV[4]) then
    redis.call("HSET", key, ARGV[2], ARGV[3])
  end
  longest = retention
end
return { "ok", now_ms, longest }
