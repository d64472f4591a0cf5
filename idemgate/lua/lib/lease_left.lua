-- Milliseconds a lease still holds; never more than a whole lease, so that a clock set back cannot lengthen it.
local function lease_left(lease_end, lease, now_ms)
  local left = (tonumber(lease_end) or 0) - now_ms
  local whole = tonumber(lease) or 0
  if left > whole then
    return whole
  end
  return left
end
