--- Make pending messages due now: those of one key, or at most 1,000 of the slot, soonest first.
--- KEYS[1..11] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] key, or "" for all
--- Returns {"ok", now ms, moved, left} {"foreign", now ms, problem}; `left` is how many are still due later (all) or 0 (one key)
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/message"
--- @include "lib/head"
--- @include "lib/hint"
local K, key = slot(KEYS), ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local before = head(K)
if key ~= "" then
  local packed = redis.call("HGET", K.pending, key)
  local m = packed and cmsgpack.unpack(packed)
  if not m or m[message.due] <= now_ms then
    return { "ok", now_ms, 0, 0 }
  end
  m[message.due], m[message.why] = now_ms, "flush"
  redis.call("HDEL", K.pending, key)
  redis.call("HSET", K.pending, key, cmsgpack.pack(m))
  if redis.call("HEXISTS", K.flight, key) == 0 then
    redis.call("ZADD", K.due, now_ms, key)
    hint(K, before, now_ms)
  end
  return { "ok", now_ms, 1, 0 }
end
local later = "(" .. string.format("%.0f", now_ms)
local keys = redis.call("ZRANGEBYSCORE", K.due, later, "+inf", "LIMIT", 0, 1000)
for _, moved in ipairs(keys) do
  -- The message is not rewritten: take sees that the two times differ.
  redis.call("ZADD", K.due, now_ms, moved)
end
hint(K, before, #keys > 0 and now_ms or nil)
return { "ok", now_ms, #keys, redis.call("ZCOUNT", K.due, later, "+inf") }
