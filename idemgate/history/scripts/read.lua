--- Return the transitions of a key, or all, from a history. Writes nothing.
--- KEYS[1] history
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] the key, or what stands for it (topics/lib/slot/history); "" = all
--- ARGV[3] what stands for the key if it is hidden
--- Returns {"ok", now ms, number of stored transitions, time of the oldest, ms, 0 = none, then the transitions, newest first}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local key, hidden, now_ms = ARGV[2], ARGV[3], math.floor(now(ARGV[1]) / 1000)
local found = redis.pcall("LRANGE", KEYS[1], 0, 1000 - 1)
if found.err then
  raise_refusal(found.err)
  return { "foreign", now_ms, "holds another type than a list" }
end
local last = found[#found] or ""
local reply = { "ok", now_ms, #found, #last >= 6 and struct.unpack(">I6", last) or 0 }
for _, entry in ipairs(found) do
  -- Most entries are of other keys, and to unpack one takes the longest.
  if string.find(entry, key, 1, true) or string.find(entry, hidden, 1, true) then
    local _, fields = pcall(cmsgpack.unpack, string.sub(entry, 7))
    -- The client reports a corrupt one, of which `fields` is no table.
    if key == "" or type(fields) ~= "table" or fields[2] == key or fields[2] == hidden then
      reply[#reply + 1] = entry
    end
  end
end
return reply
