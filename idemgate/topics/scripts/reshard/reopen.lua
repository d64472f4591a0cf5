--- Reopen a slot that this change closed. Idempotent.
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
if closed == ARGV[2] then
  redis.call("HDEL", K.meta, "batch", "gone")
  for _, name in ipairs(redis.call("HKEYS", K.meta)) do
    if string.sub(name, 1, 5) == "from:" then
      redis.call("HDEL", K.meta, name)
    end
  end
  redis.call("HSET", K.meta, "v", "3", "opened", ARGV[2])
  redis.call("PERSIST", K.meta)
  redis.pcall("PUBLISH", K.scheduled, digits(now_ms))
end
return { "ok", now_ms }
