--- Renew a member: its topics, the slots that it releases, and the slots that it wants. Return the holder of each
--- slot.
--- KEYS[1..3] members
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] member
--- ARGV[3] number of this heartbeat, from 1; it changes nothing after a higher one
--- ARGV[4] ttl, ms
--- ARGV[5] topics served, space-separated; "" = it is leaving and serves none
--- ARGV[6] generation known to the member; its member list is not returned again
--- ARGV[7] number of released slots
--- ARGV[8] number of slots to take over from any holder
--- ARGV[9..] slots: released, then taken over, then wanted; none is granted unless the known generation is current
--- Returns {"ok", now ms, generation, number of members that follow (0 if the generation is the one known),
---          two a member: id; topics, then one for each slot taken over or wanted: its holder, "" = none}
---         {"stale", now ms} {"foreign", now ms, problem}
--- Keys: key
--- @include "lib/now"
--- @include "membership/lib/members"
local K, now_us = member_keys(KEYS), now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem = validate_members(K)
if problem then
  return { "foreign", now_ms, problem }
end
local member, number, topics = ARGV[2], tonumber(ARGV[3]), ARGV[5]
if announcement_of(K, member) > number then
  return { "stale", now_ms }
end
local first_seized = 9 + ARGV[7]
local first_wanted = first_seized + ARGV[8]

-- ZREM comes first: a server without memory refuses a script whose first write is ZADD, and every member would lapse.
local news, freed = remove_lapsed(K, now_ms)
local _, before = announcement_of(K, member)
redis.call("ZREM", K.alive, member)
redis.call("ZADD", K.alive, now_ms + ARGV[4], member)
redis.call("HSET", K.meta, "v", 2, "m:" .. member, ARGV[3] .. " " .. topics)

for i = 9, first_seized - 1 do
  if redis.call("HGET", K.held, ARGV[i]) == member then
    redis.call("HDEL", K.held, ARGV[i])
    freed = true
  end
end
if news or before ~= topics then
  publish_generation(K, now_us)
elseif freed then
  redis.pcall("PUBLISH", K.alive, "")
end
local generation = redis.call("HGET", K.meta, "g") or "0"
local holders = {}
for i = first_seized, #ARGV do
  local holder = redis.call("HGET", K.held, ARGV[i])
  if generation == ARGV[6] and (not holder or i < first_wanted) then
    redis.call("HSET", K.held, ARGV[i], member)
    holder = member
  end
  holders[#holders + 1] = holder or ""
end
for _, key in pairs(K) do
  redis.call("PEXPIRE", key, math.max(86400000, 2 * ARGV[4]))
end

local reply = { "ok", now_ms, generation, 0 }
if generation ~= ARGV[6] then
  local meta = redis.call("HGETALL", K.meta)
  for i = 1, #meta, 2 do
    local served = string.match(meta[i], "^m:") and string.match(meta[i + 1], "^%d+ (.+)$")
    if served then
      reply[4] = reply[4] + 1
      reply[#reply + 1] = string.sub(meta[i], 3)
      reply[#reply + 1] = served
    end
  end
end
for _, holder in ipairs(holders) do
  reply[#reply + 1] = holder
end
return reply
