-- Build the member of the ready set: it sorts by due time, then key.
local function ready_member(due, key)
  return string.format("%015.0f", due) .. key
end

-- Build the member of the waiting set: it sorts by group, rank (with priorities only), due time, then key.
local function waiting_member(key, m)
  return m.group .. "\0" .. (m.rank or "") .. "\0" .. ready_member(m.due, key)
end
