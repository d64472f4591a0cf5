-- Milliseconds the lease of a record in progress still holds; never more than a whole lease, so that a clock set back cannot
-- lengthen it.
local function lease_left(ends, lease, now_ms)
  return math.min(ends - now_ms, lease)
end
