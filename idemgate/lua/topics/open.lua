--- Make a topic, or check that it is the one that exists.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- ARGV[3] policy, packed; compared byte by byte
--- ARGV[4] "1" = replace a differing policy, unless slots or merge differ: what is pending was put where, and packed as, they say
--- Returns {"made", now ms, policy, to} {"same", now ms, policy, to} {"changed", now ms, former policy, to}
---         {"differs", now ms, stored policy, to}
---         {"resized", now ms, stored policy, to} (another number of slots, which the asked one was changed to: ask with that)
---         {"foreign", now ms, problem}; `to` is how many slots it is being given, 0 = it is being forgotten, -1 = neither
--- @include "lib/now"
--- @include "lib/noted"
--- @include "lib/same"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local kind = redis.call("TYPE", KEYS[1]).ok
if kind ~= "hash" and kind ~= "none" then
  return { "foreign", now_ms, "holds a " .. kind .. ", expected a hash" }
end
local was = redis.call("HGET", KEYS[1], ARGV[2] .. " was")
local to = noted(redis.call("HGET", KEYS[1], ARGV[2] .. " to"), was)
if not to then
  return { "foreign", now_ms, "holds under " .. ARGV[2] .. " to, or was, what is no number of slots" }
end
local stored = redis.call("HGET", KEYS[1], ARGV[2])
if not stored then
  redis.call("HSET", KEYS[1], ARGV[2], ARGV[3])
  return { "made", now_ms, ARGV[3], to }
end
if stored == ARGV[3] then
  return { "same", now_ms, stored, to }
end
local whole, before = pcall(cmsgpack.unpack, stored)
if not whole or type(before) ~= "table" then
  return { "foreign", now_ms, "holds under " .. ARGV[2] .. " what is no policy" }
end
local after = cmsgpack.unpack(ARGV[3])
if before.slots ~= after.slots and string.find(" " .. (was or "") .. " ", " " .. tostring(after.slots) .. " ", 1, true) then
  return { "resized", now_ms, stored, to }
end
if ARGV[4] ~= "1" or before.slots ~= after.slots or not same(before.merge, after.merge) then
  return { "differs", now_ms, stored, to }
end
redis.call("HSET", KEYS[1], ARGV[2], ARGV[3])
return { "changed", now_ms, stored, to }
