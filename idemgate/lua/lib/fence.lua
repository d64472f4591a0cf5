-- Return the next fencing token. It is above the stored one. It is also never below the clock, so tokens rise even
-- when the record was lost.
local function fence(stored, now_us)
  local after = (tonumber(stored) or 0) + 1
  if after > now_us then
    return after
  end
  return now_us
end
