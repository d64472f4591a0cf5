-- A caller's time as ms since the epoch: "a" and an instant, "d" and a delay; nil for "" (the policy decides). The past is now.
local function when(text, now_ms)
  local number = tonumber(string.sub(text, 2))
  if string.sub(text, 1, 1) == "d" then
    return now_ms + number
  end
  return number and math.max(number, now_ms)
end
