-- Format an integer as decimal text. Lua's own conversion writes a fencing token as 1.787e+15.
local function digits(number)
  return string.format("%.0f", number)
end
