--- End deliveries: done, try again, dead, never started, or not possible yet (try later, not counted as an attempt); or done but for
--- some of the items, which are tried again ("part").
--- What waited behind each is scheduled in the same step.
--- A delivery that is not this owner's any more is not touched and answered "lost". What waits behind is read: once 128 KiB of it were,
--- the deliveries that follow are answered "left", and are to be ended by another request.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4] the deliveries, packed: an array, two a delivery: key; fence
--- ARGV[5..] four a delivery: its place, from 1, named only if it is not just done; "nack" | "bury" | "return" | "defer" | "part";
---         delay before the next attempt, ms; failure, of "part" what failed (lib/part)
--- Returns {"ok", now ms, next due ms (0 = none), then one a delivery: "ok" | "dead" | "cancelled" | "lost" | "left"}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/policy"
--- @include "lib/settling"
--- @include "lib/next_due"
--- @include "lib/reopened"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, ended = wrong(K), nil
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end
local others = {}
for i = 5, #ARGV, 4 do
  others[tonumber(ARGV[i])] = { ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3] }
end
ended, problem = settling(K, p, cmsgpack.unpack(ARGV[4]), others, now_ms)
if problem then
  return { "foreign", now_ms, problem }
end
local reply = { "ok", now_ms, next_due(K, now_ms, 0), unpack(ended) }
reopened(K, p, reply[3], now_ms)
return tell(K, ARGV[2], now_ms, reply)
