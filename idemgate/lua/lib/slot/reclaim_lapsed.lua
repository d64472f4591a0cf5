--- @include "lib/slot/budget"
-- Reclaim deliveries whose lease lapsed, at most 32, within the byte budget. A corrupt entry stops it: that one and the
-- ones behind it stay untouched. Return the remaining bytes, and the problem of the corrupt entry. The functions for it are
-- created only if a lease lapsed.
local function reclaim_lapsed(K, p, lease, now_ms, done)
  local lapsed, problem = redis.call("ZRANGEBYSCORE", K.leases, "-inf", now_ms, "LIMIT", 0, 32), nil
  if #lapsed == 0 then
    return max_call_bytes
  end
  --- @include "lib/validate/slot"
  --- @include "lib/validate/stored"
  --- @include "lib/slot/reclaim_delivery"
  --- @include "lib/dead/discard_dead_letters"
  local accepted, room = count_within_budget(K, p, lapsed, max_call_bytes, "messages", "next")
  problem = validate_slot(K)
  for i = 1, problem and 0 or accepted do
    local key = lapsed[i]
    problem = redis.call("HEXISTS", K.inflight, key) == 0 and missing_entry(K.leases, key) or validate_keys(K, p, { key })
    if problem then
      break
    end
    reclaim_delivery(K, p, key, lease, now_ms, done)
  end
  if done.buried then
    discard_dead_letters(K, p, now_ms)
  end
  return room, problem
end
