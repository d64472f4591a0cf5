--- Return the scopes that programs have registered. Writes nothing.
--- KEYS[1] scopes
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then the names} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local names = redis.pcall("HKEYS", KEYS[1])
if names.err then
  raise_refusal(names.err)
  return { "foreign", now_ms, "holds another type than a hash" }
end
local reply = { "ok", now_ms }
for i, one in ipairs(names) do -- `unpack` takes 8,000 values at most
  reply[i + 2] = one
end
return reply
