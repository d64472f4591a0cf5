-- Return the due time of a member of the ready set (`ready_member` of topics/lib/schedule/schedule), or nil, and its key.
local function parse_ready(member)
  local from = string.byte(member, 16) == 45 and 17 or 31
  return tonumber(string.sub(member, 1, 15)), string.sub(member, from)
end
