-- Parse what topics/reshard/begin and topics/reshard/finish stored about a topic. Return the target slot count: 0 = the topic is
-- being deleted, -1 = no change is under way. Return nil if the mark, or the list of former slot counts
-- (space-separated), is corrupt.
local function parse_reshard_mark(change, was)
  local to = change and string.match(change, "^(%d+) ") or not change and "-1" or ""
  for word in string.gmatch(was or "", "[^ ]+") do
    if not string.find(word, "^[1-9]%d?%d?%d?%d?$") or tonumber(word) > 16384 then
      return nil
    end
  end
  return tonumber(to) and tonumber(to) <= 16384 and tonumber(to) or nil
end
