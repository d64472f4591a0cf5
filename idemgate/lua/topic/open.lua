--- Make a topic, or check that it is the one that exists.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- ARGV[3] policy, packed; compared byte by byte
--- ARGV[4] "1" = replace a differing policy, unless slots or merge differ: what is pending was put where, and packed as, they say
--- Returns {"made", now ms} {"same", now ms} {"changed", now ms, former policy} {"differs", now ms, stored policy}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/same"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local kind = redis.call("TYPE", KEYS[1]).ok
if kind ~= "hash" and kind ~= "none" then
  return { "foreign", now_ms, "holds a " .. kind .. ", expected a hash" }
end
local stored = redis.call("HGET", KEYS[1], ARGV[2])
if not stored then
  redis.call("HSET", KEYS[1], ARGV[2], ARGV[3])
  return { "made", now_ms }
end
if stored == ARGV[3] then
  return { "same", now_ms }
end
local before, after = cmsgpack.unpack(stored), cmsgpack.unpack(ARGV[3])
if ARGV[4] ~= "1" or before.slots ~= after.slots or not same(before.merge, after.merge) then
  return { "differs", now_ms, stored }
end
redis.call("HSET", KEYS[1], ARGV[2], ARGV[3])
return { "changed", now_ms, stored }
