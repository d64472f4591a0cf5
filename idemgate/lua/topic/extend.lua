--- Heartbeat: the leases of these deliveries run anew from now. Naturally idempotent.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] lease, ms
--- ARGV[3..] two a delivery: key; fence
--- Returns {"ok", now ms, then one a delivery: "ok" | "cancelled" (still held, will not be tried again) | "lost"}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/delivery"
local K, lease = slot(KEYS), tonumber(ARGV[2])
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local reply, live, held = { "ok", now_ms }, {}, false
for i = 3, #ARGV, 2 do
  local packed = redis.call("HGET", K.flight, ARGV[i])
  live[i] = packed and sound_delivery(packed)
  if packed and not live[i] then
    return { "foreign", now_ms, unsound(K.flight, ARGV[i]) }
  end
end
for i = 3, #ARGV, 2 do
  local key, d = ARGV[i], live[i]
  if d and digits(d[delivery.fence]) == ARGV[i + 1] then
    -- ZREM first: a server without memory refuses a script whose first write is ZADD, and a lease must outlive that.
    redis.call("ZREM", K.lease, key)
    redis.call("ZADD", K.lease, now_ms + lease, key)
    held = true
    reply[#reply + 1] = d[delivery.cancelled] == 1 and "cancelled" or "ok"
  else
    reply[#reply + 1] = "lost"
  end
end
-- The last token tells how late it was at least, by which take finds a clock set back.
local last = tonumber(redis.call("HGET", K.facts, "fence")) or 0
if held and last < now_us - 1 then
  redis.call("HSET", K.facts, "fence", digits(now_us - 1))
end
return reply
