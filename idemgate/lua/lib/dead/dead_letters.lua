--- @include "lib/digits"
--- @include "lib/slot/counters"
-- Return a free number for a dead letter: its delivery's token, or the next lower free one. Merged slots may have
-- issued the same token. Higher numbers may become tokens of later deliveries.
local function free_dead_id(K, token)
  while redis.call("HEXISTS", K.dead_data, digits(token)) == 1 do
    token = token - 1
  end
  return token
end

-- Add a message to the dead letters. Call `discard_dead_letters` once after all of them.
local function add_dead_letter(K, key, packed, reason, token, now_ms)
  local number = free_dead_id(K, token)
  local id = digits(number)
  redis.call("HSET", K.dead_data, id, track_large(K, cmsgpack.pack({ key, packed, reason, now_ms, number })))
  redis.call("ZADD", K.dead, now_ms, id)
end
