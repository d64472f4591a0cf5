--- Return the members, their topics, and the holder of each slot. Writes nothing.
--- KEYS[1..3] members
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, generation, number of members that follow, three a member: id; topics ("" = it is leaving);
---          time at which it lapses, ms, then two a slot: slot; holder} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "membership/lib/members"
local K = member_keys(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = validate_members(K)
if problem then
  return { "foreign", now_ms, problem }
end
local reply = { "ok", now_ms, redis.call("HGET", K.meta, "g") or "0", 0 }
local alive, live = redis.call("ZRANGEBYSCORE", K.alive, "(" .. now_ms, "+inf", "WITHSCORES"), {}
for i = 1, #alive, 2 do
  local number, topics = announcement_of(K, alive[i])
  if number < 9007199254740991 then
    live[alive[i]] = true
    reply[4] = reply[4] + 1
    reply[#reply + 1] = alive[i]
    reply[#reply + 1] = topics
    reply[#reply + 1] = tonumber(alive[i + 1])
  end
end
local held = redis.call("HGETALL", K.held)
for i = 1, #held, 2 do
  if live[held[i + 1]] then
    reply[#reply + 1] = held[i]
    reply[#reply + 1] = held[i + 1]
  end
end
return reply
