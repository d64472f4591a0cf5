--- Add transitions of keys to the history of a scope, and forget the oldest ones. A retry adds nothing twice.
--- KEYS[1] history
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] number of transitions to keep
--- ARGV[3] ms until the history expires
--- ARGV[4..] two a transition: its age, ms; the transition, packed by the client, no two alike
--- Returns {"ok", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local key, now_ms, kept, known, added = KEYS[1], math.floor(now(ARGV[1]) / 1000), tonumber(ARGV[2]), {}, {}
local stored = redis.pcall("LRANGE", key, 0, kept - 1)
if stored.err then
  raise_refusal(stored.err)
  return { "foreign", now_ms, "holds another type than a list" }
end
for _, entry in ipairs(stored) do
  known[string.sub(entry, 7)] = true
end
for i = 4, #ARGV, 2 do
  local age, entry = tonumber(ARGV[i]), ARGV[i + 1]
  if not known[entry] then
    added[#added + 1] = struct.pack(">I6", math.max(0, now_ms - age)) .. entry
  end
end
if #added > 0 then
  redis.call("LPUSH", key, unpack(added))
  redis.call("LTRIM", key, 0, kept - 1)
  redis.call("PEXPIRE", key, ARGV[3])
end
return { "ok", now_ms }
