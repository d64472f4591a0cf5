--- Take due messages. Requeue deliveries whose lease lapsed, then deliver due messages. Each delivery gets a fencing
--- token and a lease, and counts as an attempt.
--- KEYS[1..15] slot
--- KEYS[16..17] results (topics/lib/slot/store_result), only if the topic stores them
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] maximum number of messages
--- ARGV[5] lease, ms
--- ARGV[6] maximum deliveries of this slot in flight, 0 = unlimited
--- ARGV[7] us between two deliveries at the rate limit, 0 = unlimited
--- ARGV[8] burst: deliveries allowed at once after an idle time
--- Returns {"ok", now ms, next due ms (0 = none), lapsed, fencing token, or the record of the pause (topics/pause), then three a delivery: key, due ms,
---         message}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/run_steps"
--- @include "topics/lib/slot/take_messages"
local K, p = slot(KEYS), policy(ARGV[3])
K.results = p.results and { [0] = KEYS[16], [1] = KEYS[17] }
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local function steps()
  local reply, problem = take_messages(K, p, now_us, ARGV[2], {
    most = tonumber(ARGV[4]), lease = tonumber(ARGV[5]), flights = tonumber(ARGV[6]), interval = tonumber(ARGV[7]),
    burst = tonumber(ARGV[8]),
  })
  return reply or { "foreign", now_ms, problem }
end
return run_steps(K, now_ms, steps)
