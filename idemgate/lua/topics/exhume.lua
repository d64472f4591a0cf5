--- Take dead letters out: back to the pending ones with their attempts reset, due now, or deleted for good.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4] "redrive" | "delete"
--- ARGV[5] most letters to take when none is named, oldest first
--- ARGV[6..] ids; of these, or of the oldest, it goes through 128 KiB of letters, or one, and as much of what they join
--- Returns {"ok", now ms, letters taken out, letters left, ids gone through} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/restore"
--- @include "lib/policy"
--- @include "lib/count"
--- @include "lib/head"
--- @include "lib/hint"
--- @include "lib/portion"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end
local ids = { unpack(ARGV, 6) }
if #ids == 0 then
  ids = redis.call("ZRANGE", K.dead, 0, tonumber(ARGV[5]) - 1)
end
local going, keys = portion(K, p, ids, most_bytes, "grave"), {}
for i = 1, going do
  local id = ids[i]
  local packed = redis.call("HGET", K.grave, id)
  local letter = packed and unpacked(packed)
  if packed and not (letter and type(letter[1]) == "string" and sound_message(letter[2], p.merge)) then
    return { "foreign", now_ms, unsound(K.grave, id) }
  end
  keys[i] = letter and letter[1] or ""
end
going = portion(K, p, keys, most_bytes, "pending", "flight")
for i = 1, going do
  problem = keys[i] ~= "" and broken(K, p, { keys[i] })
  if problem then
    return { "foreign", now_ms, problem }
  end
end
local before, taken, triggers, folded = head(K), 0, 0, 0
for i = 1, going do
  local id = ids[i]
  local letter = redis.call("HGET", K.grave, id)
  if letter then
    letter = cmsgpack.unpack(letter)
    local m = cmsgpack.unpack(letter[2])
    redis.call("ZREM", K.dead, id)
    redis.call("HDEL", K.grave, id)
    taken, triggers = taken + 1, triggers + m[message.count]
    if ARGV[4] == "redrive" then
      m[message.attempts], m[message.pinned] = 0, 0
      folded = folded + restore(K, p, letter[1], m, now_ms, "redrive")
    end
  end
end
if taken > 0 and ARGV[4] == "redrive" then
  count(K, { redriven = taken, redriven_triggers = triggers, folded = folded })
  hint(K, before, now_ms)
elseif taken > 0 then
  count(K, { deleted = taken, deleted_triggers = triggers })
end
return tell(K, ARGV[2], now_ms, { "ok", now_ms, taken, redis.call("ZCARD", K.dead), going })
