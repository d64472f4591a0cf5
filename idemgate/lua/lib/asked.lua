--- @include "lib/when"
-- What one trigger asks for: "" (nothing, as most do), a time (lib/when), or packed {time or "", priority or "", group or "", version or "",
-- event id (lib/events) or ""}. Given back as a table, whose `at` is a time in ms or nil, the policy's; `text` is what it was made of.
local function asked(text, now_ms)
  if string.byte(text) ~= 149 then
    return { text = text, at = when(text, now_ms), priority = "", group = "", version = "", event = "" }
  end
  local at, priority, group, version, event = unpack(cmsgpack.unpack(text))
  return { text = text, at = when(at, now_ms), priority = priority, group = group, version = version, event = event }
end
