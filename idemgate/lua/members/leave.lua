--- Take a member away, and free what it holds. A late copy of one of its announcements will not bring it back.
--- KEYS[1..3] crew
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] member
--- Returns {"ok", now ms} {"absent", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/crew"
local K, now_us = crew(KEYS), now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem = astray(K)
if problem then
  return { "foreign", now_ms, problem }
end
local member = ARGV[2]
local last, topics = serves(K, member)
if last == 0 then
  return { "absent", now_ms }
end
-- Its name stays for a minute, with a number that no announcement has; a member without topics is no member.
redis.call("ZREM", K.alive, member)
redis.call("ZADD", K.alive, now_ms + 60000, member)
if redis.call("PTTL", K.alive) < 0 then
  redis.call("PEXPIRE", K.alive, 86400000) -- it was the last one, so that the key is a new one
end
redis.call("HSET", K.facts, "m:" .. member, "9007199254740991 ")
local freed = free(K, { [member] = true })
if topics ~= "" then
  changed(K, now_us)
elseif freed then
  redis.call("PUBLISH", K.alive, "")
end
return { "ok", now_ms }
