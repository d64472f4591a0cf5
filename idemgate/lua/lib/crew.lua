--- @include "lib/digits"
--- @include "lib/fence"
-- The keys of one group of members, by name, in the order in which every members script gets them. Data dictionary:
--   alive  zset  member -> when it lapses unless it announces itself again, ms; the name is also the channel of hints
--   facts  hash  v layout; g generation; "m:" member -> number of its last announcement, a space, its topics
--   held   hash  slot ("images:7") -> member that takes from it, or still drains it
local function crew(keys)
  return { alive = keys[1], facts = keys[2], held = keys[3] }
end
-- Says which of our keys holds something we did not write, or nil. Looks before the first write.
local function astray(K)
  for name, expected in pairs({ alive = "zset", facts = "hash", held = "hash" }) do
    local found = redis.call("TYPE", K[name]).ok
    if found ~= expected and found ~= "none" then
      return K[name] .. " holds a " .. found .. ", expected a " .. expected
    end
  end
  local layout = redis.call("HGET", K.facts, "v")
  if layout and layout ~= "1" then
    return K.facts .. " says layout " .. layout .. ", this program knows layout 1"
  end
end
-- Number of the last announcement and the topics of a member; 0 and "" if it is not known.
local function serves(K, member)
  local known = redis.call("HGET", K.facts, "m:" .. member)
  if known then
    local number, topics = string.match(known, "^(%d+) (.*)$")
    return tonumber(number) or 0, topics or ""
  end
  return 0, ""
end
-- Every slot in the hands of these members (a set) is free from here on. Returns whether there was one.
local function free(K, members)
  local held, found = redis.call("HGETALL", K.held), false
  for i = 1, #held, 2 do
    if members[held[i + 1]] then
      redis.call("HDEL", K.held, held[i])
      found = true
    end
  end
  return found
end
-- Forgets the members that lapsed, and frees what they held. Returns whether one of them served anything, and
-- whether something became free.
local function sweep(K, now_ms)
  local lapsed, gone, served = redis.call("ZRANGEBYSCORE", K.alive, "-inf", now_ms), {}, false
  for _, member in ipairs(lapsed) do
    local _, topics = serves(K, member)
    served = served or topics ~= ""
    gone[member] = true
    redis.call("ZREM", K.alive, member)
    redis.call("HDEL", K.facts, "m:" .. member)
  end
  return served, #lapsed > 0 and free(K, gone)
end
-- A new generation, and a hint to everybody to look. Hints only: a lost one costs the rest of an interval.
local function changed(K, now_us)
  local generation = digits(fence(redis.call("HGET", K.facts, "g"), now_us))
  redis.call("HSET", K.facts, "g", generation)
  redis.pcall("PUBLISH", K.alive, generation)
end
