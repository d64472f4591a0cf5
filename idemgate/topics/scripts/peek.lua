--- Return the state of a key: its pending message and its delivery in flight. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] key
--- Returns {"ok", now ms, message or "", due ms, fence or 0, lease end ms, message in flight or "",
---         its due ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/slot/lease_times"
local K, key = slot(KEYS), ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = validate_slot(K)
local entries = not problem and read_entries(K, { key })
problem = problem or validate_keys(K, nil, { key }, entries)
if problem then
  return { "foreign", now_ms, problem }
end
local d = entries[key]
local packed, due = redis.call("HGET", d and K.next or K.messages, key), 0
if packed then
  due = tonumber(redis.call("ZSCORE", K.scheduled, key)) or select(3, read_header(packed))
end
if not d then
  return { "ok", now_ms, packed or "", due, 0, 0, "", 0 }
end
local running = redis.call("HGET", K.messages, key)
d = parse_entry(d)
return {
  "ok", now_ms, packed or "", due, tonumber(d.token), lease_end(K, redis.call("ZSCORE", K.leases, key) or 0), running,
  d.due or select(3, read_header(running)),
}
