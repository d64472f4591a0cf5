-- Return microseconds since the epoch: the server's TIME, or the test clock's time when one is given. Call it once
-- per script.
local function now(test_time)
  if test_time ~= "" then
    return tonumber(test_time)
  end
  local t = redis.call("TIME")
  return t[1] * 1000000 + t[2]
end
