--- Give the right back: the next caller may run. Leaves a tombstone that keeps attempts, checkpoint and token, so that a late
--- copy of this owner's claim cannot lock the key again. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] how long the tombstone stays, ms
--- ARGV[4] "1" = the attempt was never started: undo its count
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/read"
--- @include "lib/recorded"
--- @include "lib/rewrite"
--- @include "lib/ended"
--- @include "lib/wake"
local key, token, keep = KEYS[1], ARGV[2], tonumber(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.owner ~= token then
  return { "lost", now_ms }
end
local state = r.state
if state == "r" then
  return { "ok", now_ms }
end
if state ~= "p" then
  return { "lost", now_ms }
end

local left = ended(r, "r", "", token, now_ms + keep, now_ms, r.data)
left.print = ""
if ARGV[4] == "1" then
  left.attempts = left.attempts - 1
end
rewrite(key, recorded(left), keep)
wake(key, r.waited, r.owner)
return { "ok", now_ms }
