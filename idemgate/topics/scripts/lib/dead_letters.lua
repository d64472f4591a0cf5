--- @include "lib/now"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/slot/message"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/slot/budget"
-- Return a free id for a dead letter: the token of its delivery, or the next lower free number, since deliveries of one
-- take share a token. Higher numbers may become tokens of later deliveries. `dead_ids` remembers how far this call got.
local dead_ids = {}
local function free_dead_id(K, token)
  local id = dead_ids[token] or token
  while redis.call("HEXISTS", K.dead_data, digits(id)) == 1 do
    id = id - 1
  end
  dead_ids[token] = id
  return id
end

-- Store a dead letter {key, message, failure, time of death, id} under a free id.
local function store_dead_letter(K, letter, died)
  letter[5] = free_dead_id(K, letter[5])
  local id = digits(letter[5])
  redis.call("HSET", K.dead_data, id, track_large(K, cmsgpack.pack(letter)))
  redis.call("ZADD", K.dead, died, id)
end

-- Add a message to the dead letters. Call `discard_dead_letters` once after all of them.
local function add_dead_letter(K, key, m, failure, token, now_ms)
  store_dead_letter(K, { key, encode_message(m), failure, now_ms, token }, now_ms)
end

-- Discard and count dead letters past retention or beyond the maximum. One call discards at most 100 and stays within
-- the byte budget.
local function discard_dead_letters(K, p, now_ms)
  local old = redis.call("ZRANGEBYSCORE", K.dead, "-inf", now_ms - p.retention, "LIMIT", 0, 100)
  local beyond = redis.call("ZCARD", K.dead) - p.max_dead
  if beyond > #old then
    old = redis.call("ZRANGE", K.dead, 0, math.min(beyond, 100) - 1)
  end
  if #old == 0 then
    return
  end
  old = { unpack(old, 1, count_within_budget(K, p, old, max_call_bytes, "dead_data")) }
  local triggers = 0
  for _, packed in ipairs(redis.call("HMGET", K.dead_data, unpack(old))) do
    -- Discard a corrupt dead letter as well: it is past its retention.
    local found = unpack_table(packed)
    local m = found and validate_message(found[2])
    triggers = triggers + (m and m.count or 0)
  end
  redis.call("HDEL", K.dead_data, unpack(old))
  redis.call("ZREM", K.dead, unpack(old))
  add_counters(K, { expired = #old, expired_triggers = triggers })
end
