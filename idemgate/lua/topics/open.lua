--- Create a topic, or check that the existing one has the same policy.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- ARGV[3] policy, packed; compared byte by byte
--- ARGV[4] "1" = replace a differing policy, unless slots or merge differ: these decide where pending messages are, and how packed
--- ARGV[5] the stored policy that may be replaced, or "": a late copy must not undo a later redefinition
--- Returns {"made", now ms, policy, to} {"same", now ms, policy, to} {"changed", now ms, former policy, to}
---         {"differs", now ms, stored policy, to} {"stale", now ms, stored policy, to} (it is not ARGV[5]: send it there)
---         {"resized", now ms, stored policy, to} (the requested slot count is a former one: open with the stored one)
---         {"foreign", now ms, problem}; `to` is the slot count of a change under way, 0 = being deleted, -1 = neither
--- @include "lib/now"
--- @include "lib/validate/parse_reshard_mark"
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
if ARGV[4] ~= "1" or before.slots ~= after.slots or not equal_values(before.merge, after.merge) then
  return { "differs", now_ms, stored, to }
elseif stored ~= ARGV[5] then
  return { "stale", now_ms, stored, to }
end
redis.call("HSET", KEYS[1], ARGV[2], ARGV[3])
return { "changed", now_ms, stored, to }
