--- Return the version that is stored for a key. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] key
--- Returns {"ok", now ms, version or "", its expiry, ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "lib/problems"
local K, name = slot(KEYS), "v" .. ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = validate_slot(K)
if problem then
  return { "foreign", now_ms, problem }
end
local expires = tonumber(redis.call("ZSCORE", K.dedup_expiry, name)) or 0
local held = expires > now_ms and redis.call("HGET", K.dedup, name)
local version = held and string.match(held, "^%-?%d+") or ""
if held and version == "" then
  return { "foreign", now_ms, corrupt_entry(K.dedup, name) }
end
return { "ok", now_ms, version, expires }
