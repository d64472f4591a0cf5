--- @include "lib/message"
--- @include "lib/sound"
--- @include "lib/score"
--- @include "lib/sortable"
--- @include "lib/lean"
--- @include "lib/portion"
-- Of a topic with priorities: what has come due gets its rank among the ready ones, at most 160 a call and 512 KiB of them, up to the
-- first that is not sound. Returns what is wrong where that is the very first, and then nothing was written, or nil.
local function rank(K, p, now_ms)
  local found = redis.call("ZRANGEBYSCORE", K.due, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, 160)
  local next_keys, keys, moved, ranks = {}, {}, {}, {}
  for i = 1, #found, 2 do
    next_keys[#next_keys + 1] = found[i]
  end
  local going = portion(K, p, next_keys, 4 * most_bytes, "pending")
  for i, packed in ipairs(going > 0 and redis.call("HMGET", K.pending, unpack(next_keys, 1, going)) or {}) do
    local key, due, m = next_keys[i], tonumber(found[2 * i]), lean_message(packed)
    if not m and i == 1 then
      return packed and unsound(K.pending, key) or vacant(K.due, key)
    elseif not m then
      break
    end
    keys[i] = key
    if due ~= m[message.due] then
      m = sound_message(packed)
      m[message.due], m[message.why] = due, "flush"
      moved[#moved + 1] = key
      moved[#moved + 1] = cmsgpack.pack(m)
    end
    ranks[#ranks + 1] = score(p, m)
    ranks[#ranks + 1] = sortable(due, key)
  end
  if #keys > 0 then
    redis.call("ZADD", K.ready, unpack(ranks))
    redis.call("ZREM", K.due, unpack(keys))
  end
  if #moved > 0 then
    redis.call("HSET", K.pending, unpack(moved))
  end
end
