--- Forget a key: the next claim is the first. A live claim is forgotten only by force.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = even while an owner's lease holds
--- Returns {"forgotten", now ms} {"absent", now ms} {"busy", now ms, lease left ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/record"
--- @include "lib/read"
--- @include "lib/lease_left"
--- @include "lib/wake"
local key = KEYS[1]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
local state = r[record.state]
if state == "absent" then
  return { "absent", now_ms }
end
if state == "p" and ARGV[2] ~= "1" then
  local left = lease_left(r, now_ms)
  if left > 0 then
    return { "busy", now_ms, left, r[record.attempts] }
  end
end
redis.call("DEL", key)
wake(key, r)
if state ~= "p" and r[record.ends] <= now_ms then
  return { "absent", now_ms }
end
return { "forgotten", now_ms }
