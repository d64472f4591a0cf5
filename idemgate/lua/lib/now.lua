-- Microseconds since the epoch: the server's TIME, or the test clock's when one is given. Call it once a script.
local function now(given)
  if given ~= "" then
    return tonumber(given)
  end
  local t = redis.call("TIME")
  return t[1] * 1000000 + t[2]
end
