--- @include "lib/digits"
--- @include "lib/slot/counters"
--- @include "lib/slot/message"
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

-- Add a message to the dead letters. Call `discard_dead_letters` once after all of them.
local function add_dead_letter(K, key, m, failure, token, now_ms)
  local number = free_dead_id(K, token)
  local id = digits(number)
  redis.call("HSET", K.dead_data, id, track_large(K, cmsgpack.pack({ key, encode_message(m), failure, now_ms, number })))
  redis.call("ZADD", K.dead, now_ms, id)
end
