--- Remove a member and release its slots. A delayed heartbeat does not bring it back.
--- KEYS[1..3] members
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] member
--- Returns {"ok", now ms} {"absent", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "membership/lib/members"
local K, now_us = member_keys(KEYS), now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem = validate_members(K)
if problem then
  return { "foreign", now_ms, problem }
end
local member = ARGV[2]
local last, topics = announcement_of(K, member)
if last == 0 then
  return { "absent", now_ms }
end
-- Its name stays for a minute, with a number above that of any heartbeat. A member without topics does not count.
redis.call("ZREM", K.alive, member)
redis.call("ZADD", K.alive, now_ms + 60000, member)
if redis.call("PTTL", K.alive) < 0 then
  redis.call("PEXPIRE", K.alive, 86400000) -- it was the last one, so that the key is a new one
end
redis.call("HSET", K.meta, "m:" .. member, "9007199254740991 ")
local freed = release_slots(K, { [member] = true })
if topics ~= "" then
  publish_generation(K, now_us)
elseif freed then
  redis.pcall("PUBLISH", K.alive, "")
end
return { "ok", now_ms }
