--- Dead letters of the slot, newest first: at most as many as asked, and 128 KiB of them or one. Writes nothing.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] died then or later, ms
--- ARGV[3] died before, ms; or, with an id, then, and is older than that letter
--- ARGV[4] id or ""
--- ARGV[5] how many to show
--- Returns {"ok", now ms, dead letters in all, then two a letter: id, letter} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
local K, most = slot(KEYS), tonumber(ARGV[5])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local ids = {}
if ARGV[4] ~= "" then
  -- The letter itself may be gone, so it is no place to count from.
  for _, id in ipairs(redis.call("ZREVRANGEBYSCORE", K.dead, ARGV[3], ARGV[3])) do
    if id < ARGV[4] then
      ids[#ids + 1] = id
    end
  end
end
for _, id in ipairs(redis.call("ZREVRANGEBYSCORE", K.dead, "(" .. ARGV[3], ARGV[2], "LIMIT", 0, most)) do
  ids[#ids + 1] = id
end
local reply, size = { "ok", now_ms, redis.call("ZCARD", K.dead) }, 0
for i = 1, math.min(most, #ids) do
  local letter = redis.call("HGET", K.grave, ids[i])
  if not letter then
    return { "foreign", now_ms, vacant(K.dead, ids[i]) }
  end
  size = size + #letter
  if size > 131072 and i > 1 then
    break
  end
  reply[#reply + 1] = ids[i]
  reply[#reply + 1] = letter
end
return reply
