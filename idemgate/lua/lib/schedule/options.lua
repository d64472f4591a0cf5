-- Parse a caller's time into ms since the epoch: "a" and an instant, "d" and a delay. Return nil for "", which leaves
-- it to the policy. A past instant becomes now.
local function parse_time(text, now_ms)
  local number = tonumber(string.sub(text, 2))
  if string.sub(text, 1, 1) == "d" then
    return now_ms + number
  end
  return number and math.max(number, now_ms)
end

-- Parse the options of one trigger: "" (none, the common case), a time (parse_time), or packed {time or "", priority
-- or "", group or "", version or "", event id (lib/dedup/events) or ""}. In the returned table, `at` is a time in ms
-- or nil for the policy's. `text` is the input. `plain` is true without any option.
local function parse_options(text, now_ms)
  if string.byte(text) ~= 149 then
    return { text = text, at = parse_time(text, now_ms), priority = "", group = "", version = "", event = "", plain = text == "" }
  end
  local at, priority, group, version, event = unpack(cmsgpack.unpack(text))
  return { text = text, at = parse_time(at, now_ms), priority = priority, group = group, version = version, event = event }
end
