-- How long the record of a running claim may stay, ms. One that is held waits for somebody to decide: ten years.
local function outlives(held, otherwise)
  if held == 1 then
    return 315360000000
  end
  return otherwise
end
