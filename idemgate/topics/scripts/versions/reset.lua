--- Delete the version that is stored for a key. Its next trigger is accepted with any version.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] key
--- Returns {"reset", now ms} {"absent", now ms} (no version is stored) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
local K, name = slot(KEYS), "v" .. ARGV[3]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end
local expires = tonumber(redis.call("ZSCORE", K.dedup_expiry, name)) or 0
-- Start with HDEL: a server without memory refuses a script whose first write may allocate.
local deleted = redis.call("HDEL", K.dedup, name)
redis.call("ZREM", K.dedup_expiry, name)
local is_stored = deleted == 1 and expires > now_ms
return remember_reply(K, ARGV[2], now_ms, { is_stored and "reset" or "absent", now_ms })
