-- Schedules as many of a group's line, the first of it first, as the group has room for.
local function advance(K, group, limit)
  local inside = redis.call("HGET", K.busy, group)
  local room = limit - (inside and #cmsgpack.unpack(inside) or 0)
  if group == "" or room <= 0 then
    return
  end
  for _, member in ipairs(redis.call("ZRANGEBYLEX", K.line, "[" .. group .. "\0", "(" .. group .. "\1", "LIMIT", 0, room)) do
    redis.call("ZREM", K.line, member)
    local at = string.find(member, "\0", #group + 2, true)
    redis.call("ZADD", K.due, tonumber(string.sub(member, at + 1, at + 15)), string.sub(member, at + 16))
  end
end
