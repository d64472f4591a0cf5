--- Cancel the pending message of a key. One that is in flight may be running: it is not tried again.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4] key
--- Returns {"cancelled", now ms} (no delivery starts after this) {"in_flight", now ms} {"absent", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/message"
--- @include "lib/policy"
--- @include "lib/unplace"
--- @include "lib/vacate"
--- @include "lib/delivery"
--- @include "lib/count"
--- @include "lib/head"
--- @include "lib/hint"
local K, p, key = slot(KEYS), policy(ARGV[3]), ARGV[4]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end
problem = broken(K, p, { key })
if problem then
  return { "foreign", now_ms, problem }
end
-- A write that frees memory comes first: a server that has none left refuses a script that begins with any other.
redis.call("HDEL", K.facts, "")
local packed = redis.call("HGET", K.pending, key)
local d = redis.call("HGET", K.flight, key)
if not packed and not d then
  return tell(K, ARGV[2], now_ms, { "absent", now_ms })
end
if packed then
  local m, before = cmsgpack.unpack(packed), head(K)
  unplace(K, key, m)
  redis.call("HDEL", K.pending, key)
  if not d then
    vacate(K, m[message.group], key, p.group_limit)
    hint(K, before, head(K))
  end
  count(K, { cancelled = 1, cancelled_triggers = m[message.count] })
end
if d then
  d = cmsgpack.unpack(d)
  d[delivery.cancelled] = 1
  redis.call("HSET", K.flight, key, cmsgpack.pack(d))
end
return tell(K, ARGV[2], now_ms, { d and "in_flight" or "cancelled", now_ms })
