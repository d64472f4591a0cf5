--- Return the processes of the index, the last report first. Writes nothing.
--- KEYS[1] presence
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] number of processes
--- Returns {"ok", now ms, then for each: id, 32 hex digits; time of its last report, ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found = redis.pcall("ZREVRANGE", KEYS[1], 0, tonumber(ARGV[2]) - 1, "WITHSCORES")
if found.err then
  raise_refusal(found.err)
  return { "foreign", now_ms, "holds another type than a sorted set" }
end
local reply = { "ok", now_ms }
for i, one in ipairs(found) do -- `unpack` takes 8,000 values at most
  reply[i + 2] = one
end
return reply
