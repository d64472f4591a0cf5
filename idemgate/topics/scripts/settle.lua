--- Settle deliveries: ack, retry, bury, return (never started), defer (not counted as an attempt), or retry some of
--- the items ("part"). The next messages of their keys and groups are scheduled in the same step. A delivery that
--- another owner holds by now is left untouched and answered "lost". After reading 128 KiB of messages, the remaining
--- deliveries are answered "left" and need another request.
--- KEYS[1..15] slot
--- KEYS[16..17] results (topics/lib/slot/store_result), only if the topic stores them
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] deliveries, a packed array, two a delivery: key; fencing token
--- ARGV[5..] four a delivery: its index, from 1, only if it is not a plain ack; "nack" | "bury" | "return" | "defer" | "part" |
---         "result" (an ack with a result); delay before the next attempt, ms; failure, or what failed of "part" (apply_partial),
---         or the result (topics/lib/slot/store_result)
--- Returns {"ok", now ms, next due ms (0 = none), then one a delivery: "ok" | "dead" | "cancelled" | "lost" | "left"}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/run_steps"
--- @include "topics/lib/replies"
--- @include "topics/lib/slot/settle_deliveries"
--- @include "topics/lib/schedule/next_due"
local K, p = slot(KEYS), policy(ARGV[3])
K.results = p.results and { [0] = KEYS[16], [1] = KEYS[17] }
local now_ms = math.floor(now(ARGV[1]) / 1000)
local function steps()
  local problem = check_layout(K, redis.call("HGET", K.meta, "v"))
  if problem then
    return { "foreign", now_ms, problem }
  end
  local known_reply = recall_reply(K, ARGV[2], now_ms) -- fault: settle-copy
  if known_reply then
    return known_reply
  end
  local others = {}
  for i = 5, #ARGV, 4 do
    others[tonumber(ARGV[i])] = { ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3] }
  end
  -- Read the schedule before the first write: its keys may have another type.
  local due = waiting_due(K, now_ms) or false
  local ended, changed = settle_deliveries(K, p, cmsgpack.unpack(ARGV[4]), others, now_ms, ARGV[2])
  if not ended then
    return { "foreign", now_ms, changed }
  elseif changed then
    due = nil
  end
  local reply = { "ok", now_ms, next_due(K, now_ms, 0, due), unpack(ended) }
  notify_reopened(K, p, reply[3], now_ms)
  return remember_reply(K, ARGV[2], now_ms, reply)
end
return run_steps(K, now_ms, steps)
