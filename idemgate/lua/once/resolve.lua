--- Decide about a key whose owner vanished: it is done (with a result, or none), or it may run again. A live claim is left alone.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = done, "0" = may run again
--- ARGV[3] retention, ms
--- ARGV[4] kind of result: "v" or "n"
--- ARGV[5] result
--- Returns {"ok", now ms} {"absent", now ms} (nothing to resolve) {"busy", now ms, lease left ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/record"
--- @include "lib/read"
--- @include "lib/rewrite"
--- @include "lib/ended"
--- @include "lib/lease_left"
--- @include "lib/wake"
local key, retention = KEYS[1], tonumber(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r[record.state] ~= "p" then
  return { "absent", now_ms }
end
local left = lease_left(r, now_ms)
if left > 0 then
  return { "busy", now_ms, left, r[record.attempts] }
end
local decided
if ARGV[2] == "1" then
  decided = ended(r, "d", now_ms + retention, now_ms, ARGV[5], ARGV[4])
else
  decided = ended(r, "r", now_ms + retention, now_ms, r[record.data], "")
end
-- The vanished owner keeps no say: whatever it still sends is answered "lost".
decided[record.owner] = ""
rewrite(key, decided, retention)
wake(key, r)
return { "ok", now_ms }
