--- Return the state of a key: its pending message and its delivery in flight. Writes nothing.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] key
--- Returns {"ok", now ms, message or "", due ms, fence or 0, lease end ms, message in flight or ""} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot/slot"
--- @include "lib/validate/slot"
--- @include "lib/validate/stored"
--- @include "lib/slot/message"
--- @include "lib/slot/delivery"
local K, key = slot(KEYS), ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = validate_slot(K) or validate_keys(K, nil, { key })
if problem then
  return { "foreign", now_ms, problem }
end
local packed, due = redis.call("HGET", K.pending, key), 0
if packed then
  local m = cmsgpack.unpack(packed)
  due = tonumber(redis.call("ZSCORE", K.scheduled, key)) or m[message.due]
  if due ~= m[message.due] then
    m[message.due], m[message.why] = due, "flush"
    packed = cmsgpack.pack(m)
  end
end
local d = redis.call("HGET", K.inflight, key)
d = d and cmsgpack.unpack(d) or { [delivery.fence] = 0, [delivery.message] = "" }
return { "ok", now_ms, packed or "", due, d[delivery.fence], tonumber(redis.call("ZSCORE", K.leases, key)) or 0, d[delivery.message] }
