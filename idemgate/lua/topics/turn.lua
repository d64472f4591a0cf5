--- End deliveries, and take what is due: "settle", then "take", in one step. Each has its own request id, by which a copy of one of them
--- alone gets the same answer; a copy of this takes nothing that was not taken before. Nothing is taken where some are "left".
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id of what ends
--- ARGV[3] policy (lib/policy)
--- ARGV[4] the deliveries that end, packed: an array, two a delivery: key; fence
--- ARGV[5] request id of what is taken
--- ARGV[6] most messages to take
--- ARGV[7] lease, ms
--- ARGV[8] deliveries of this slot in flight at most, 0 = any number
--- ARGV[9] us between two deliveries at the permitted rate, 0 = any rate
--- ARGV[10] deliveries that may be made at once after a rest, at the permitted rate
--- ARGV[11..] four a delivery: its place, from 1, named only if it is not just done; "nack" | "bury" | "return" | "defer" | "part";
---         delay before the next attempt, ms; failure, of "part" what failed (lib/part)
--- Returns {"ok", now ms, next due ms (0 = none), lapsed, then four a delivery: key, fence, due ms, message, then one a delivery that
---         was to end: "ok" | "dead" | "cancelled" | "lost" | "left"}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/policy"
--- @include "lib/settling"
--- @include "lib/taking"
--- @include "lib/reopened"
local K, p = slot(KEYS), policy(ARGV[3])
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem, ended = wrong(K), nil
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given and given[1] == "foreign" then
  return given
end
if given then
  ended = { unpack(given, 4) }
else
  local others = {}
  for i = 11, #ARGV, 4 do
    others[tonumber(ARGV[i])] = { ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3] }
  end
  ended, problem = settling(K, p, cmsgpack.unpack(ARGV[4]), others, now_ms)
  if problem then
    return { "foreign", now_ms, problem }
  end
end

local reply = { "ok", now_ms, given and given[3] or now_ms, 0 }
if ended[#ended] ~= "left" and (not given or told(K, ARGV[5], now_ms)) then
  -- What is wrong with the next messages is said to whoever asks next, now: these deliveries have ended.
  reply = taking(K, p, now_us, ARGV[5], {
    most = tonumber(ARGV[6]), lease = tonumber(ARGV[7]), flights = tonumber(ARGV[8]), interval = tonumber(ARGV[9]),
    burst = tonumber(ARGV[10]),
  }) or reply
end
if not given then
  tell(K, ARGV[2], now_ms, { "ok", now_ms, reply[3], unpack(ended) })
end
reopened(K, p, reply[3], now_ms)
for _, outcome in ipairs(ended) do
  reply[#reply + 1] = outcome
end
return reply
