--- Settle deliveries and take due messages in one step, as "settle" and "take" do. Each half has its own request id,
--- so a retry of one half gets the same answer. A retry of this script takes nothing new. If a delivery is "left",
--- nothing is taken.
--- KEYS[1..15] slot
--- KEYS[16..17] results (topics/lib/slot/store_result), only if the topic stores them
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id of the settled deliveries
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] deliveries to settle, a packed array, two a delivery: key; fencing token
--- ARGV[5] request id of the taken messages
--- ARGV[6] maximum number of messages to take
--- ARGV[7] lease, ms
--- ARGV[8] maximum deliveries of this slot in flight, 0 = unlimited
--- ARGV[9] us between two deliveries at the rate limit, 0 = unlimited
--- ARGV[10] burst: deliveries allowed at once after an idle time
--- ARGV[11..] four a delivery: its index, from 1, only if it is not a plain ack; "nack" | "bury" | "return" | "defer" | "part" |
---         "result" (an ack with a result); delay before the next attempt, ms; failure, or what failed of "part" (apply_partial),
---         or the result (topics/lib/slot/store_result)
--- Returns {"ok", now ms, next due ms (0 = none), lapsed, fencing token, or the record of the pause (topics/pause), then three a delivery: key, due ms, message,
---         then one a settled delivery: "ok" | "dead" | "cancelled" | "lost" | "left"}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/replies"
--- @include "topics/lib/slot/settle_deliveries"
--- @include "topics/lib/slot/take_messages"
--- @include "topics/lib/schedule/next_due"
local K, p = slot(KEYS), policy(ARGV[3])
K.results = p.results and { [0] = KEYS[16], [1] = KEYS[17] }
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem, ended = validate_slot(K), nil
if problem then
  return { "foreign", now_ms, problem }
end
local known_reply = recall_reply(K, ARGV[2], now_ms) -- fault: turn-copy
if known_reply and known_reply[1] == "foreign" then
  return known_reply
end
if known_reply then
  ended = { unpack(known_reply, 4) }
else
  -- @allow *
  redis.call("HSTRLEN", K.meta, "") -- the take below may need it: an ACL denial must end this before its first write
  local others = {}
  for i = 11, #ARGV, 4 do
    others[tonumber(ARGV[i])] = { ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3] }
  end
  local outcomes, found = settle_deliveries(K, p, cmsgpack.unpack(ARGV[4]), others, now_ms, ARGV[2])
  if not outcomes then
    return { "foreign", now_ms, found }
  end
  ended = outcomes
end

local reply = { "ok", now_ms, known_reply and known_reply[3] or now_ms, 0, 0 }
if ended[#ended] ~= "left" and (not known_reply or recall_reply(K, ARGV[5], now_ms)) then -- fault: turn-takes
  -- A problem with the next messages is reported by the next call: these deliveries are settled already.
  reply = take_messages(K, p, now_us, ARGV[5], {
    most = tonumber(ARGV[6]), lease = tonumber(ARGV[7]), flights = tonumber(ARGV[8]), interval = tonumber(ARGV[9]),
    burst = tonumber(ARGV[10]),
  }) or reply
else
  reply[5] = redis.call("HGET", K.meta, "paused") or 0
end
if not known_reply then
  remember_reply(K, ARGV[2], now_ms, { "ok", now_ms, reply[3], unpack(ended) })
end
notify_reopened(K, p, reply[3], now_ms)
local n = #reply
for i = 1, #ended do -- `ipairs` and `#` cost more than the rest of the loop
  reply[n + i] = ended[i]
end
return reply
