-- Texts for stored data that idemgate did not write. They begin with the key.
local function corrupt_entry(target, name)
  return target .. " holds corrupt data under " .. name
end
-- A member of a sorted set for which no data is stored.
local function missing_entry(target, member)
  return target .. " lists " .. member .. ", which has no stored data"
end

-- Return a problem with the layout of the slot, or nil. A closed slot (reshard/close) returns "closed " and the change's name,
-- and that name as a second value.
local function check_layout(K, layout)
  if layout and string.sub(layout, 1, 7) == "closed " then
    return layout, string.sub(layout, 8)
  elseif layout and layout ~= "2" then
    return K.meta .. " has layout " .. layout .. ", this version supports layout 2"
  end
end
