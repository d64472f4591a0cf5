--- Dead letters of the slot, newest first. Writes nothing.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] how many to leave out
--- ARGV[3] how many to show
--- Returns {"ok", now ms, dead letters in all, then two a letter: id, letter} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local from = tonumber(ARGV[2])
local reply = { "ok", now_ms, redis.call("ZCARD", K.dead) }
for _, id in ipairs(redis.call("ZREVRANGE", K.dead, from, from + tonumber(ARGV[3]) - 1)) do
  reply[#reply + 1] = id
  reply[#reply + 1] = redis.call("HGET", K.grave, id)
end
return reply
