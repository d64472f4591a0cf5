-- Texts for stored data that idemgate did not write. They begin with the key.
local function corrupt_entry(target, name)
  return target .. " holds corrupt data under " .. name
end
-- A member of a sorted set for which no data is stored.
local function missing_entry(target, member)
  return target .. " lists " .. member .. ", which has no stored data"
end
