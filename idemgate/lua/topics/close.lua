--- Close a slot: from here on every other script answers that it is closed, and by which change, until that change opens it.
--- What it holds stays, for `unload`. A copy that comes after it was opened again changes nothing.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- Returns {"ok", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = wrong(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
end
if closed ~= ARGV[2] and redis.call("HGET", K.facts, "opened") ~= ARGV[2] then
  -- A write that frees memory comes first: a server that has none left refuses a script that begins with any other.
  redis.call("HDEL", K.facts, "batch", "gone")
  redis.call("HSET", K.facts, "v", "closed " .. ARGV[2])
  redis.call("PERSIST", K.facts)
end
return { "ok", now_ms }
