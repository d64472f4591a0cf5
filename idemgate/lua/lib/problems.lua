-- Texts for stored data that idemgate did not write. They begin with the key.
local function corrupt_entry(target, name)
  return target .. " holds corrupt data under " .. name
end
-- A member of a sorted set for which no data is stored.
local function missing_entry(target, member)
  return target .. " lists " .. member .. ", which has no stored data"
end
-- A number that idemgate would not write. Lua represents integers below 2^53 exactly. A comparison with "nan" is false.
local function corrupt_number(target, name, number)
  if not (number >= 0 and number < 9007199254740992) then
    return corrupt_entry(target, name)
  end
end
