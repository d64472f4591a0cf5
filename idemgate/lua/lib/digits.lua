-- Format an integer as decimal text. Lua's own conversion writes a fencing token as 1.787e+15. "%.0f" takes twice the time.
local function digits(number)
  return string.format("%d", number)
end
