--- @include "lib/advance"
-- A key leaves its group, and the next of the line is scheduled.
local function vacate(K, group, key, limit)
  if group == "" then
    return
  end
  local inside = redis.call("HGET", K.busy, group)
  local left = {}
  for _, one in ipairs(inside and cmsgpack.unpack(inside) or {}) do
    if one ~= key then
      left[#left + 1] = one
    end
  end
  redis.call("HDEL", K.busy, group)
  if #left > 0 then
    redis.call("HSET", K.busy, group, cmsgpack.pack(left))
  end
  advance(K, group, limit)
end
