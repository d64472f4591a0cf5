-- Add a key to the active members of its group. Return false if `limit` others are active. An active key stays
-- active.
local function group_enter(K, group, key, limit)
  local inside = redis.call("HGET", K.group_active, group)
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
  redis.call("HSET", K.group_active, group, cmsgpack.pack(inside))
  return true
end

-- Schedule the first waiting messages of a group, as many as the group has room for.
local function group_promote(K, group, limit)
  local inside = redis.call("HGET", K.group_active, group)
  local room = limit - (inside and #cmsgpack.unpack(inside) or 0)
  if group == "" or room <= 0 then
    return
  end
  for _, member in ipairs(redis.call("ZRANGEBYLEX", K.group_waiting, "[" .. group .. "\0", "(" .. group .. "\1", "LIMIT", 0, room)) do
    redis.call("ZREM", K.group_waiting, member)
    local at = string.find(member, "\0", #group + 2, true)
    redis.call("ZADD", K.scheduled, tonumber(string.sub(member, at + 1, at + 15)), string.sub(member, at + 16))
  end
end

-- Remove a key from the active members of its group, and schedule the next waiting message.
local function group_leave(K, group, key, limit)
  if group == "" then
    return
  end
  local inside = redis.call("HGET", K.group_active, group)
  local left = {}
  for _, one in ipairs(inside and cmsgpack.unpack(inside) or {}) do
    if one ~= key then
      left[#left + 1] = one
    end
  end
  redis.call("HDEL", K.group_active, group)
  if #left > 0 then
    redis.call("HSET", K.group_active, group, cmsgpack.pack(left))
  end
  group_promote(K, group, limit)
end
