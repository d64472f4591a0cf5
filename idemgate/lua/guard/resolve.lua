--- Decide about a key whose owner vanished: it is done (with a result, or none), or it may run again. A live claim is left alone.
--- Replayed: the same answer; a copy that comes when others had their turn changes nothing.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] fencing token of the owner that vanished, as inspected
--- ARGV[4] "1" = done, "0" = may run again
--- ARGV[5] retention, ms
--- ARGV[6] kind of result: "v" or "n"
--- ARGV[7] result
--- Returns {"ok", now ms} {"absent", now ms} (nothing to resolve) {"changed", now ms} (it has another token by now)
---         {"busy", now ms, lease left ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/read"
--- @include "lib/recorded"
--- @include "lib/rewrite"
--- @include "lib/ended"
--- @include "lib/lease_holds"
--- @include "lib/wake"
local key, request, retention = KEYS[1], ARGV[2], tonumber(ARGV[5])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.owner == request then
  return { "ok", now_ms }
end
if r.state ~= "p" then
  return { "absent", now_ms }
end
if r.fence ~= tonumber(ARGV[3]) then
  return { "changed", now_ms }
end
local left = lease_holds(key, r, now_ms)
if left > 0 then
  return { "busy", now_ms, left, r.attempts }
end
-- The vanished owner keeps no say: whatever it still sends is answered "lost", since the request stands in its place.
local state, kind, data = "r", "", r.data
if ARGV[4] == "1" then
  state, kind, data = "d", ARGV[6], ARGV[7]
end
rewrite(key, recorded(ended(r, state, kind, request, now_ms + retention, now_ms, data)), retention)
wake(key, r.waited, r.owner)
return { "ok", now_ms }
