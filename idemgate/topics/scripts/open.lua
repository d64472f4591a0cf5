--- Create a topic, or compare its policy: the higher revision is stored. Slots and merge stay: they decide where pending
--- messages are, and how packed.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- ARGV[3] policy, packed; compared byte by byte
--- Returns {"made", now ms, policy, to} {"same", now ms, policy, to} {"changed", now ms, former policy, to} (its revision is lower)
---         {"newer", now ms, stored policy, to} (its revision is higher: use it) {"differs", now ms, stored policy, to}
---         {"resized", now ms, stored policy, to} (the requested slot count is a former one: open with the stored one)
---         {"foreign", now ms, problem}; `to` is the slot count of a change under way, 0 = being deleted, -1 = neither
--- @include "lib/now"
--- @include "topics/lib/validate/parse_reshard_mark"
-- Return true if two unpacked values are equal, including nested ones.
local function equal_values(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then
    return a == b
  end
  for name, value in pairs(a) do
    if not equal_values(value, b[name]) then
      return false
    end
  end
  for name in pairs(b) do
    if a[name] == nil then
      return false
    end
  end
  return true
end

local now_ms = math.floor(now(ARGV[1]) / 1000)
local kind = redis.call("TYPE", KEYS[1]).ok
if kind ~= "hash" and kind ~= "none" then
  return { "foreign", now_ms, "holds a " .. kind .. ", expected a hash" }
end
local was = redis.call("HGET", KEYS[1], ARGV[2] .. " was")
local to = parse_reshard_mark(redis.call("HGET", KEYS[1], ARGV[2] .. " to"), was)
if not to then
  return { "foreign", now_ms, "holds a corrupt slot count of topic " .. ARGV[2] }
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
  return { "foreign", now_ms, "holds a corrupt policy of topic " .. ARGV[2] }
end
local after = cmsgpack.unpack(ARGV[3])
if before.slots ~= after.slots and string.find(" " .. (was or "") .. " ", " " .. tostring(after.slots) .. " ", 1, true) then
  return { "resized", now_ms, stored, to }
end
local ahead = (tonumber(after.revision) or 0) - (tonumber(before.revision) or 0)
if ahead == 0 or before.slots ~= after.slots or not equal_values(before.merge, after.merge) then
  return { "differs", now_ms, stored, to }
elseif ahead < 0 then
  return { "newer", now_ms, stored, to }
end
redis.call("HSET", KEYS[1], ARGV[2], ARGV[3])
return { "changed", now_ms, stored, to }
