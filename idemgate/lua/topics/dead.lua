--- Return dead letters of the slot, newest first: at most the requested number, and at most 128 KiB or a single
--- letter. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] earliest time of death, ms
--- ARGV[3] end of the times of death, ms, exclusive; with an id, letters of that very ms with a lower id follow too
--- ARGV[4] id or ""
--- ARGV[5] maximum number of letters
--- Returns {"ok", now ms, dead letters in all, then two a letter: id, letter} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot/slot"
--- @include "lib/validate/slot"
--- @include "lib/validate/problems"
local K, most = slot(KEYS), tonumber(ARGV[5])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = validate_slot(K)
if problem then
  return { "foreign", now_ms, problem }
end
local ids = {}
if ARGV[4] ~= "" then
  -- The letter with that id may be gone, so its rank cannot be the starting point.
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
  local letter = redis.call("HGET", K.dead_data, ids[i])
  if not letter then
    return { "foreign", now_ms, missing_entry(K.dead, ids[i]) }
  end
  size = size + #letter
  if size > 131072 and i > 1 then
    break
  end
  reply[#reply + 1] = ids[i]
  reply[#reply + 1] = letter
end
return reply
