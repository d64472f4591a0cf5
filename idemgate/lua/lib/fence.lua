-- The next fencing token: above the stored one, and not below the clock, so that it rises even when the record was lost.
local function fence(stored, now_us)
  local after = (tonumber(stored) or 0) + 1
  if after > now_us then
    return after
  end
  return now_us
end
