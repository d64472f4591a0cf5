--- Return the number of messages per state, and the slot's counters. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = read a closed slot, too
--- Returns {"ok", now ms, scheduled, ready, waiting, blocked, in flight, dead, earliest due ms (0 = none), then two a
---         counter: name, value}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not (closed and ARGV[2] == "1") then
  return { "foreign", now_ms, problem }
end
local scheduled, ready = redis.call("ZCARD", K.scheduled), redis.call("ZCOUNT", K.scheduled, "-inf", now_ms)
local ranked, blocked = redis.call("ZCARD", K.ready), redis.call("ZCARD", K.group_waiting)
local waiting = redis.call("HLEN", K.next)
local earliest = tonumber(redis.call("ZRANGE", K.scheduled, 0, 0, "WITHSCORES")[2]) or 0
if ranked > 0 and (earliest == 0 or earliest > now_ms) then
  earliest = now_ms
end
local reply = {
  "ok", now_ms, scheduled - ready, ready + ranked, waiting, blocked, redis.call("ZCARD", K.leases), redis.call("ZCARD", K.dead), earliest,
}
for _, value in ipairs(redis.call("HGETALL", K.meta)) do
  reply[#reply + 1] = value
end
return reply
