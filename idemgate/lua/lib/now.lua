-- Return microseconds since the epoch: the server's TIME, or the test clock's time when one is given. Call it once
-- per script.
local function now(test_time)
  if test_time ~= "" then
    return tonumber(test_time)
  end
  local t = redis.call("TIME")
  return t[1] * 1000000 + t[2]
end

-- The byte budget of one script call. Lua hashes every string it creates, at about 1 us per kB, and creates several
-- per message. So bytes block the server as much as the number of messages does.
local max_call_bytes = 131072

-- Format an integer as decimal text. Lua's own conversion writes a fencing token as 1.787e+15. "%.0f" takes twice the
-- time.
local function digits(number)
  return string.format("%d", number)
end
