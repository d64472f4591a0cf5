--- Record an act of an operator, and forget the oldest ones. A retry records nothing twice.
--- KEYS[1] acts
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] id of the act, 16 bytes
--- ARGV[3] the act, packed by the client
--- ARGV[4] number of acts to keep
--- Returns {"ok", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local key, id, now_ms = KEYS[1], ARGV[2], math.floor(now(ARGV[1]) / 1000)
local newest = redis.pcall("LRANGE", key, 0, 15)
if newest.err then
  raise_refusal(newest.err)
  return { "foreign", now_ms, "holds another type than a list" }
end
for _, entry in ipairs(newest) do
  if string.sub(entry, 9, 24) == id then
    return { "ok", now_ms }
  end
end
redis.call("LPUSH", key, struct.pack(">I8", now_ms) .. id .. ARGV[3])
redis.call("LTRIM", key, 0, tonumber(ARGV[4]) - 1)
return { "ok", now_ms }
