--- Close a slot. From now on, every other script answers that it is closed and by which change, until that change
--- reopens it. Its content stays for `unload`. A late retry, after the slot was reopened, changes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- Returns {"ok", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
end
if closed ~= ARGV[2] and redis.call("HGET", K.meta, "opened") ~= ARGV[2] then
  -- Start with HDEL: a server without memory refuses a script whose first write may allocate.
  redis.call("HDEL", K.meta, "batch", "gone")
  redis.call("HSET", K.meta, "v", "closed " .. ARGV[2])
  redis.call("PERSIST", K.meta)
end
return { "ok", now_ms }
