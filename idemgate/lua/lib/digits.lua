-- An integer as text. Lua's own conversion writes 1.787e+15 for what is a fencing token.
local function digits(number)
  return string.format("%.0f", number)
end
