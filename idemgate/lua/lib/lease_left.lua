-- Milliseconds the lease of a record in progress still holds; never more than a whole lease, so that a clock set back cannot
-- lengthen it.
local function lease_left(r, now_ms)
  return math.min(r.ends - now_ms, r.lease)
end
