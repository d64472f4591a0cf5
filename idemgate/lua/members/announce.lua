--- Say that a member is there, what it serves, which slots it lets go and which it wants; learn who holds them.
--- KEYS[1..3] crew
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] member
--- ARGV[3] number of this announcement, from 1; after a higher one it changes nothing
--- ARGV[4] ttl, ms
--- ARGV[5] topics served, with a space between; "" = it is leaving and serves none
--- ARGV[6] generation known, whose members need not be told again
--- ARGV[7] how many slots are let go
--- ARGV[8] how many are seized, whoever holds them
--- ARGV[9..] the slots let go, those seized, those wanted; nobody gets any unless the generation is the one known
--- Returns {"ok", now ms, generation, how many members follow (0 if the generation is the one known),
---          two a member: id; topics, then one for each slot seized or wanted: who holds it now, "" = nobody}
---         {"stale", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/crew"
local K, now_us = crew(KEYS), now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem = astray(K)
if problem then
  return { "foreign", now_ms, problem }
end
local member, number, topics = ARGV[2], tonumber(ARGV[3]), ARGV[5]
if serves(K, member) > number then
  return { "stale", now_ms }
end
local first_seized = 9 + ARGV[7]
local first_wanted = first_seized + ARGV[8]

-- ZREM first: a server without memory refuses a script whose first write is ZADD, and nobody would be a member then.
local news, freed = sweep(K, now_ms)
local _, before = serves(K, member)
redis.call("ZREM", K.alive, member)
redis.call("ZADD", K.alive, now_ms + ARGV[4], member)
redis.call("HSET", K.facts, "v", 1, "m:" .. member, ARGV[3] .. " " .. topics)

for i = 9, first_seized - 1 do
  if redis.call("HGET", K.held, ARGV[i]) == member then
    redis.call("HDEL", K.held, ARGV[i])
    freed = true
  end
end
if news or before ~= topics then
  changed(K, now_us)
elseif freed then
  redis.pcall("PUBLISH", K.alive, "")
end
local generation = redis.call("HGET", K.facts, "g") or "0"
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
  local facts = redis.call("HGETALL", K.facts)
  for i = 1, #facts, 2 do
    local served = string.match(facts[i], "^m:") and string.match(facts[i + 1], "^%d+ (.+)$")
    if served then
      reply[4] = reply[4] + 1
      reply[#reply + 1] = string.sub(facts[i], 3)
      reply[#reply + 1] = served
    end
  end
end
for _, holder in ipairs(holders) do
  reply[#reply + 1] = holder
end
return reply
