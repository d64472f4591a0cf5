--- Store dead letters that were exported, each with its id or the next lower free one. It discards none to make room.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4..] packed dead letters (topics/lib/slot/slot)
--- Returns {"ok", now ms, then one a letter: "added" | "present" (the letter of that id has its key and its time of death) |
---         "expired" (it is past the retention) | "full"} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/dead_letters"
local K, p = slot(KEYS), policy(ARGV[3])
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end
local meta, letters, counts, last = redis.call("HMGET", K.meta, "fence", "accepted"), {}, {}, 0
local fence, serial, triggers = tonumber(meta[1]) or 0, count_of(meta[2]), 0
local problem = corrupt_number(K.meta, "fence", fence)
for i = 4, #ARGV do
  local letter = unpack_table(ARGV[i])
  local m = letter and validate_message(letter[2], p.merge)
  if not m then
    problem = problem or corrupt_entry("argument", i)
    break
  end
  letters[i - 3], counts[i - 3] = letter, m.count
  letter[5] = math.min(letter[5], math.max(fence, now_us)) -- no token is ahead of both
  last = math.max(last, letter[5])
end
if problem then
  return { "foreign", now_ms, problem }
end
local reply, room = { "ok", now_ms }, p.max_dead - redis.call("ZCARD", K.dead)
redis.call("HSET", K.meta, "v", "3", "fence", digits(math.max(fence, last)))
for i, letter in ipairs(letters) do
  local answer = "added"
  local held = unpack_table(redis.call("HGET", K.dead_data, digits(letter[5])))
  if held and held[1] == letter[1] and held[4] == letter[4] then
    answer = "present"
  elseif letter[4] <= now_ms - p.retention then
    answer = "expired"
  elseif room <= 0 then
    answer = "full"
  else
    room, triggers = room - 1, triggers + counts[i]
    -- The serials of another slot may be above those of this one.
    letter[2] = with_serial(letter[2], serial + triggers) .. string.sub(letter[2], HEADER_SIZE + 1)
    store_dead_letter(K, letter, letter[4])
  end
  reply[i + 2] = answer
end
add_counters(K, { accepted = triggers })
return remember_reply(K, ARGV[2], now_ms, reply)
