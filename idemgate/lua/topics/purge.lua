--- Look at what a closed slot holds, or delete it for good. What stays behind for a day is the note that it is closed: it refuses those
--- who still go by a topic that was forgotten.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- ARGV[3] "1" = delete, "0" = look
--- Returns {"ok", now ms, pending, in flight, dead} {"open", now ms} (another change closed or opened it) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = wrong(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
elseif closed ~= ARGV[2] then
  return { "open", now_ms }
end
local given = redis.call("HGET", K.facts, "gone")
if given then
  given = unpacked(given)
  if not (given and numbers(given, { 1, 2, 3 })) then
    return { "foreign", now_ms, unsound(K.facts, "gone") }
  end
  return { "ok", now_ms, given[1], given[2], given[3] }
end
local found = { redis.call("HLEN", K.pending), redis.call("HLEN", K.flight), redis.call("ZCARD", K.dead) }
if ARGV[3] == "1" then
  for _, part in ipairs({ "due", "pending", "lease", "flight", "dead", "grave", "facts", "memo", "fade", "ready", "busy", "line" }) do
    redis.call("UNLINK", K[part])
  end
  redis.call("HSET", K.facts, "v", "closed " .. ARGV[2], "gone", cmsgpack.pack(found))
  redis.call("PEXPIRE", K.facts, 86400000)
end
return { "ok", now_ms, found[1], found[2], found[3] }
