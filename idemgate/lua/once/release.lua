--- Give the right back: the next caller may run. Leaves a tombstone that keeps attempts, checkpoint and token, so that a late
--- copy of this owner's claim cannot lock the key again. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] how long the tombstone stays, ms
--- ARGV[4] "1" = the attempt was never started: undo its count
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/record"
--- @include "lib/wake"
local key, token, keep = KEYS[1], ARGV[2], tonumber(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end
if found.o ~= token then
  return { "lost", now_ms }
end
if found.s == "r" then
  return { "ok", now_ms }
end
if found.s ~= "p" then
  return { "lost", now_ms }
end

local attempts = tonumber(found.n)
if ARGV[4] == "1" then
  attempts = attempts - 1
end
redis.call("HDEL", key, "e", "l", "w", "h", "p")
redis.call("HSET", key, "s", "1r", "n", attempts, "t", digits(now_ms + keep), "a", digits(now_ms))
redis.call("PEXPIRE", key, keep)
wake(key, found)
return { "ok", now_ms }
