--- Return all topics. Writes nothing.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then four a topic: name, policy, target slot count or -1 (no change), former slot counts, space-separated}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/validate/parse_reshard_mark"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local kind = redis.call("TYPE", KEYS[1]).ok
if kind ~= "hash" and kind ~= "none" then
  return { "foreign", now_ms, "holds a " .. kind .. ", expected a hash" }
end
local reply, found, named = { "ok", now_ms }, {}, {}
local all = redis.call("HGETALL", KEYS[1])
for i = 1, #all, 2 do
  found[all[i]] = all[i + 1]
  if not string.find(all[i], " ", 1, true) then
    named[#named + 1] = all[i]
  end
end
table.sort(named)
for _, name in ipairs(named) do
  reply[#reply + 1] = name
  reply[#reply + 1] = found[name]
  local was = found[name .. " was"]
  local to = parse_reshard_mark(found[name .. " to"], was)
  if not to then
    return { "foreign", now_ms, "holds a corrupt slot count of topic " .. name }
  end
  reply[#reply + 1] = to
  reply[#reply + 1] = was or ""
end
return reply
