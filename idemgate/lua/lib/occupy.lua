-- A key enters its group. False when the group is full, that is, when `limit` others are in it; a key that is in it stays in it.
local function occupy(K, group, key, limit)
  local inside = redis.call("HGET", K.busy, group)
  inside = inside and cmsgpack.unpack(inside) or {}
  for _, one in ipairs(inside) do
    if one == key then
      return true
    end
  end
  if #inside >= limit then
    return false
  end
  inside[#inside + 1] = key
  redis.call("HSET", K.busy, group, cmsgpack.pack(inside))
  return true
end
