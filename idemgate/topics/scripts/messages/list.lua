--- Return pending messages of the slot after a position, in the order of four sets: scheduled, ready, waiting for their
--- group, behind a delivery of their key. Within a set they follow its score, then the bytes of its member. A call returns
--- at most the requested number, and at most 128 KiB or a single message. It examines at most 200 members. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] set: 1 scheduled, 2 ready, 3 waiting for the group, 4 leases
--- ARGV[3] score of the member of the position, or "" for the begin of the set
--- ARGV[4] member of the position, or ""
--- ARGV[5] maximum number of messages
--- Returns {"ok", now ms, set, score and member of the last member examined (0, "" and "": there are no more), then five a
---         message: set, score, member, key, message} {"foreign", now ms, problem}
--- Keys: set, hash
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/schedule/parse_ready"
--- @include "lib/problems"
local K, most = slot(KEYS), tonumber(ARGV[5])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local max_read, room = 131072, 200
local problem = validate_slot(K)
if problem then
  return { "foreign", now_ms, problem }
end

-- Return true if a text is behind another one by its bytes. The operator of Lua would use the locale of the server.
local function is_behind(one, other)
  for i = 1, math.min(#one, #other) do
    local a, b = string.byte(one, i), string.byte(other, i)
    if a ~= b then
      return a > b
    end
  end
  return #one > #other
end

-- Return the rank of the first member after a position. That of the position may be gone, so a binary search finds its
-- place among those of the same score.
local function first_after(set, score, member)
  local low, high = redis.call("ZCOUNT", set, "-inf", "(" .. score), redis.call("ZCOUNT", set, "-inf", score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_behind(redis.call("ZRANGE", set, middle, middle)[1], member) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- How a member of each set names its key, and which hash has the message.
local sets = {
  { K.scheduled, function(member) return member end },
  { K.ready, function(member) return select(2, parse_ready(member)) end },
  { K.group_waiting, function(member) return string.match(member, "^[^%z]*%z[^%z]*%z" .. string.rep("%d", 30) .. "(.*)$") end },
  { K.leases, function(member) return member end },
}
local reply, size, number = { "ok", now_ms, 0, "", "" }, 0, tonumber(ARGV[2])
local score, last, full = ARGV[3], ARGV[4], false
while sets[number] and not full do
  local set, key_of = unpack(sets[number])
  local from = score == "" and 0 or first_after(set, score, last)
  local wanted = math.min(room, most - (#reply - 5) / 5)
  local found = redis.call("ZRANGE", set, from, from + (number == 4 and room or wanted) - 1, "WITHSCORES")
  for i = 1, #found, 2 do
    local key, hash = key_of(found[i]), number == 4 and K.next or K.messages
    local bytes = key and redis.call("HSTRLEN", hash, key) or 0
    if bytes == 0 and number < 4 then
      return { "foreign", now_ms, missing_entry(set, found[i]) }
    end
    if bytes > 0 then
      size = size + bytes
      if #reply == 5 + 5 * most or size > max_read and #reply > 5 then
        full = true
        break
      end
      for _, value in ipairs({ number, found[i + 1], found[i], key, redis.call("HGET", hash, key) }) do
        reply[#reply + 1] = value
      end
    end
    last, score, room = found[i], found[i + 1], room - 1
    reply[3], reply[4], reply[5] = number, score, last
  end
  full = full or room == 0 or #reply == 5 + 5 * most
  number, score, last = number + 1, "", ""
end
if not full then
  reply[3], reply[4], reply[5] = 0, "", ""
end
return reply
