-- noted(change, was): what topics/resize and topics/resized noted of a topic, read back: the number of slots that it is to have, 0 = it
-- is to be forgotten, -1 = nothing changes; nil where the one or the numbers that it had, by spaces, are nothing of theirs.
local function noted(change, was)
  local to = change and string.match(change, "^(%d+) ") or not change and "-1" or ""
  for word in string.gmatch(was or "", "[^ ]+") do
    if not string.find(word, "^[1-9]%d?%d?%d?%d?$") or tonumber(word) > 16384 then
      return nil
    end
  end
  return tonumber(to) and tonumber(to) <= 16384 and tonumber(to) or nil
end
