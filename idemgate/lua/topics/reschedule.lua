--- Give the pending message of a key another time.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4] key
--- ARGV[5] when: "a" + ms since the epoch, "d" + ms from now
--- Returns {"rescheduled", now ms, due ms} {"in_flight", now ms, 0} (nothing is pending behind it) {"absent", now ms, 0}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/message"
--- @include "lib/policy"
--- @include "lib/place"
--- @include "lib/unplace"
--- @include "lib/vacate"
--- @include "lib/when"
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
local in_flight = redis.call("HEXISTS", K.flight, key) == 1
if not packed then
  return tell(K, ARGV[2], now_ms, { in_flight and "in_flight" or "absent", now_ms, 0 })
end
local m, due, before = cmsgpack.unpack(packed), when(ARGV[5], now_ms), head(K)
local stood = unplace(K, key, m)
m[message.due], m[message.why], m[message.pinned] = due, "time", 1
redis.call("HDEL", K.pending, key)
redis.call("HSET", K.pending, key, cmsgpack.pack(m))
if stood then
  place(K, key, m)
  vacate(K, m[message.group], key, p.group_limit)
  hint(K, before, head(K))
end
return tell(K, ARGV[2], now_ms, { "rescheduled", now_ms, due })
