--- Take what is due: first put back deliveries whose lease lapsed, then hand out due messages, each with a fencing token, a lease and
--- its attempt counted.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4] most messages to take
--- ARGV[5] lease, ms
--- ARGV[6] deliveries of this slot in flight at most, 0 = any number
--- ARGV[7] us between two deliveries at the permitted rate, 0 = any rate
--- ARGV[8] deliveries that may be made at once after a rest, at the permitted rate
--- Returns {"ok", now ms, next due ms (0 = none), lapsed, then four a delivery: key, fence, due ms, message}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/policy"
--- @include "lib/taking"
local K = slot(KEYS)
local now_us = now(ARGV[1])
local now_ms, reply, problem = math.floor(now_us / 1000), nil, wrong(K)
if not problem then
  reply, problem = taking(K, policy(ARGV[3]), now_us, ARGV[2], {
    most = tonumber(ARGV[4]), lease = tonumber(ARGV[5]), flights = tonumber(ARGV[6]), interval = tonumber(ARGV[7]),
    burst = tonumber(ARGV[8]),
  })
end
return reply or { "foreign", now_ms, problem }
