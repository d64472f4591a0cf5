--- Count a trigger that a client refused before it was sent.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] name of the counter
--- ARGV[4] "1" if the client has opened the topic, else "": then a slot that does not exist is not created
--- Returns {"counted", now ms} {"absent", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "topics/lib/slot/counters"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
elseif ARGV[4] ~= "1" and redis.call("HEXISTS", K.meta, "v") == 0 then
  return { "absent", now_ms }
end
redis.call("HSET", K.meta, "v", "3")
add_counters(K, { [ARGV[3]] = 1 })
return remember_reply(K, ARGV[2], now_ms, { "counted", now_ms })
