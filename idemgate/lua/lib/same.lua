-- Whether two unpacked values are the same, all the way down.
local function same(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then
    return a == b
  end
  for name, value in pairs(a) do
    if not same(value, b[name]) then
      return false
    end
  end
  for name in pairs(b) do
    if a[name] == nil then
      return false
    end
  end
  return true
end
