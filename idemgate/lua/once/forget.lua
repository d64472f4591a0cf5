--- Forget a key: the next claim is the first. A live claim is forgotten only by force.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = even while an owner's lease holds
--- Returns {"forgotten", now ms} {"absent", now ms} {"busy", now ms, lease left ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/record"
--- @include "lib/lease_left"
--- @include "lib/wake"
local key = KEYS[1]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end
if found.s == "absent" then
  return { "absent", now_ms }
end
local left = lease_left(found.e, found.l, now_ms)
if found.s == "p" and left > 0 and ARGV[2] ~= "1" then
  return { "busy", now_ms, left, tonumber(found.n) }
end
redis.call("DEL", key)
wake(key, found)
if found.s ~= "p" and tonumber(found.t) <= now_ms then
  return { "absent", now_ms }
end
return { "forgotten", now_ms }
