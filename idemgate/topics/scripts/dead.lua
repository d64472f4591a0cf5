--- Return dead letters of the slot, newest first: at most the requested number, and at most 128 KiB or a single
--- letter. A call examines at most 200 letters if some may not match, and 128 KiB of large ones. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] earliest time of death, ms
--- ARGV[3] end of the times of death, ms, exclusive; with an id, letters of that very ms with a lower id follow too
--- ARGV[4] id or ""
--- ARGV[5] maximum number of letters
--- ARGV[6] start of the key, "" = any
--- ARGV[7] "1" if that is the whole key, else ""
--- ARGV[8] part of the failure, "" = any
--- Returns {"ok", now ms, dead letters in all, time of death and id of the last letter examined ("" and "": there are no more),
---         then two a letter: id, letter} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "lib/problems"
--- @include "topics/lib/validate/stored"
local K, most, start, failure = slot(KEYS), tonumber(ARGV[5]), ARGV[6], ARGV[8]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local max_read, filtered = 131072, start .. failure ~= ""

-- Return how many letters are newer than the position, or at it. The letter of the position may be gone, so a binary
-- search finds its place among those of the same ms.
local function count_before(ms, id)
  local low, high = redis.call("ZCOUNT", K.dead, "(" .. ms, "+inf"), redis.call("ZCOUNT", K.dead, ms, "+inf")
  while id ~= "" and low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call("ZREVRANGE", K.dead, middle, middle)[1] < id then
      high = middle
    else
      low = middle + 1
    end
  end
  return high
end

-- Return the packed letters with these ids, from the first on, as many as one call may read.
local function read_letters(ids)
  if #ids == 0 or redis.call("HEXISTS", K.meta, "large") == 0 then
    return #ids > 0 and redis.call("HMGET", K.dead_data, unpack(ids)) or {}
  end
  local letters, size = {}, 0
  for i, id in ipairs(ids) do
    size = size + redis.call("HSTRLEN", K.dead_data, id)
    if size > max_read and i > 1 then
      break
    end
    letters[i] = redis.call("HGET", K.dead_data, id)
  end
  return letters
end

-- Return whether a letter may match. The client reports a corrupt one.
local function may_match(packed)
  local letter = filtered and unpack_table(packed)
  if not letter or type(letter[1]) ~= "string" or type(letter[3]) ~= "string" then
    return true
  end
  local key = ARGV[7] == "1" and letter[1] or string.sub(letter[1], 1, #start)
  return key == start and string.find(letter[3], failure, 1, true) ~= nil
end

local problem = validate_slot(K)
if problem then
  return { "foreign", now_ms, problem }
end
local from, room = count_before(ARGV[3], ARGV[4]), filtered and 200 or most
local scored, ids, died = redis.call("ZREVRANGE", K.dead, from, from + room - 1, "WITHSCORES"), {}, {}
for i = 1, #scored, 2 do
  if tonumber(scored[i + 1]) >= tonumber(ARGV[2]) then
    ids[#ids + 1], died[#died + 1] = scored[i], scored[i + 1]
  end
end
local reply, size, examined = { "ok", now_ms, redis.call("ZCARD", K.dead), "", "" }, 0, 0
local letters = read_letters(ids)
for i, id in ipairs(ids) do
  local letter = letters[i]
  if letter == false then
    return { "foreign", now_ms, missing_entry(K.dead, id) }
  elseif not letter or #reply == 5 + 2 * most then
    break
  elseif may_match(letter) then
    size = size + #letter
    if size > max_read and #reply > 5 then
      break
    end
    reply[#reply + 1], reply[#reply + 2] = id, letter
  end
  examined = i
end
if examined > 0 and (examined < #ids or #ids == room and from + room < reply[3]) then
  reply[4], reply[5] = died[examined], ids[examined]
end
return reply
