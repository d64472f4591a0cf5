--- @include "lib/now"
--- @include "lib/fence"
-- Return the keys of one worker group by name, in the order every members script receives them. Data dictionary:
--   alive  zset  member -> time at which it lapses without another heartbeat, ms; the key's name is also the hint channel
--   meta   hash  v layout; g generation; "m:" member -> number of its last heartbeat, a space, its topics
--   held   hash  slot ("images:7") -> member that takes from it or still drains it
local function member_keys(keys)
  return { alive = keys[1], meta = keys[2], held = keys[3] }
end
-- Return a problem if one of the group's keys holds data that idemgate did not write, else nil. Runs before the first
-- write.
local function validate_members(K)
  for name, expected in pairs({ alive = "zset", meta = "hash", held = "hash" }) do
    local found = redis.call("TYPE", K[name]).ok
    if found ~= expected and found ~= "none" then
      return K[name] .. " holds a " .. found .. ", expected a " .. expected
    end
  end
  local layout = redis.call("HGET", K.meta, "v")
  if layout and layout ~= "2" then
    return K.meta .. " has layout " .. layout .. ", this version supports layout 2"
  end
end
-- Return the number of a member's last heartbeat and its topics, or 0 and "" for an unknown member.
local function announcement_of(K, member)
  local known = redis.call("HGET", K.meta, "m:" .. member)
  if known then
    local number, topics = string.match(known, "^(%d+) (.*)$")
    return tonumber(number) or 0, topics or ""
  end
  return 0, ""
end
-- Release every slot held by these members (a set). Return true if there was one.
local function release_slots(K, members)
  local held, found = redis.call("HGETALL", K.held), false
  for i = 1, #held, 2 do
    if members[held[i + 1]] then
      redis.call("HDEL", K.held, held[i])
      found = true
    end
  end
  return found
end
-- Remove lapsed members and release their slots. Return whether one of them served a topic, and whether a slot was
-- released.
local function remove_lapsed(K, now_ms)
  local lapsed, gone, served = redis.call("ZRANGEBYSCORE", K.alive, "-inf", now_ms), {}, false
  for _, member in ipairs(lapsed) do
    local _, topics = announcement_of(K, member)
    served = served or topics ~= ""
    gone[member] = true
    redis.call("ZREM", K.alive, member)
    redis.call("HDEL", K.meta, "m:" .. member)
  end
  return served, #lapsed > 0 and release_slots(K, gone)
end
-- Increase the generation and publish a hint. A lost hint costs the rest of one heartbeat interval.
local function publish_generation(K, now_us)
  local generation = digits(fence(redis.call("HGET", K.meta, "g"), now_us))
  redis.call("HSET", K.meta, "g", generation)
  redis.pcall("PUBLISH", K.alive, generation)
end
