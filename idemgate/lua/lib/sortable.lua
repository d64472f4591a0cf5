-- Due time and key as a member that sorts by them.
local function sortable(due, key)
  return string.format("%015.0f", due) .. key
end
