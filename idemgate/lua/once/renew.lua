--- A heartbeat: the lease runs anew from now. Naturally idempotent.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] lease, ms
--- ARGV[4] how long attempts and checkpoint outlive the lease, ms
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/record"
--- @include "lib/outlives"
local key, token, lease, keep = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end
if found.s ~= "p" or found.o ~= token then
  return { "lost", now_ms }
end

-- HDEL first: a server without memory refuses a script whose first write is HSET, and a lease must outlive that.
redis.call("HDEL", key, "e")
redis.call("HSET", key, "e", digits(now_ms + lease), "l", ARGV[3])
redis.call("PEXPIRE", key, outlives(found.h, lease + keep))
return { "ok", now_ms }
