--- @include "lib/now"
-- Return the end of a lease, ms, by its start, us, and the start as text by the end (topics/lib/slot/inflight).
local function lease_end(K, start)
  K.term = K.term or tonumber(redis.call("HGET", K.meta, "term")) or 0
  return math.floor(start / 1000) + K.term -- fault: lease-term
end
local function lease_start(K, ends)
  return digits(1000 * (ends - lease_end(K, 0)))
end
