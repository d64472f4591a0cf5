--- Remove a process that ends.
--- KEYS[1] presence
--- KEYS[2] presence:<id>
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] id of the process, 32 hex digits
--- Returns {"ok", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local former = redis.pcall("STRLEN", KEYS[2])
if type(former) == "table" then
  raise_refusal(former.err)
  return { "foreign", now_ms, KEYS[2] .. " holds another type than a string" }
end
local gone = redis.pcall("ZREM", KEYS[1], ARGV[2])
if type(gone) == "table" then
  raise_refusal(gone.err)
  return { "foreign", now_ms, KEYS[1] .. " holds another type than a sorted set" }
end
redis.call("UNLINK", KEYS[2])
return { "ok", now_ms }
