--- Make pending messages due now: those of one key, or at most 500 of the slot, soonest first. The call that finds no more of them
--- also takes those that stand behind a delivery of their key: they are due when it ends.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] key, or "" for all
--- Returns {"ok", now ms, moved, left} {"foreign", now ms, problem}; `left` is how many are still due later (all) or 0 (one key)
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/message"
--- @include "lib/head"
--- @include "lib/hint"
--- @include "lib/lean"
local K, key = slot(KEYS), ARGV[3]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end
local later, behind = "(" .. string.format("%.0f", now_ms), {}
if key ~= "" then
  problem = broken(K, nil, { key })
elseif redis.call("ZCOUNT", K.due, later, "+inf") <= 500 then
  for _, one in ipairs(redis.call("ZRANGE", K.lease, 0, -1)) do
    if redis.call("HEXISTS", K.pending, one) == 1 then
      behind[#behind + 1] = one
      problem = problem or not lean_message(redis.call("HGET", K.pending, one)) and unsound(K.pending, one)
    end
  end
end
if problem then
  return { "foreign", now_ms, problem }
end

-- Rewrites one message as due now. Returns how many that were.
local function hasten(one)
  local packed = redis.call("HGET", K.pending, one)
  local m = packed and cmsgpack.unpack(packed)
  if not m or (tonumber(redis.call("ZSCORE", K.due, one)) or m[message.due]) <= now_ms then
    return 0
  end
  m[message.due], m[message.why] = now_ms, "flush"
  redis.call("HDEL", K.pending, one)
  redis.call("HSET", K.pending, one, cmsgpack.pack(m))
  return 1
end

local before, moved, left = head(K), 0, 0
if key ~= "" then
  moved = hasten(key)
  if moved == 1 and redis.call("HEXISTS", K.flight, key) == 0 then
    redis.call("ZADD", K.due, now_ms, key)
    hint(K, before, now_ms)
  end
else
  for _, one in ipairs(redis.call("ZRANGEBYSCORE", K.due, later, "+inf", "LIMIT", 0, 500)) do
    -- The message is not rewritten: take and trigger see that the two times differ.
    redis.call("ZADD", K.due, now_ms, one)
    moved = moved + 1
  end
  if moved > 0 then
    -- Their messages have other times now, and no trigger that is numbered above these.
    local facts = redis.call("HMGET", K.facts, "accepted", "flushed")
    redis.call("HSET", K.facts, "flushed", digits(math.max(tonumber(facts[1]) or 0, tonumber(facts[2]) or 0)))
  end
  hint(K, before, moved > 0 and now_ms or nil)
  left = redis.call("ZCOUNT", K.due, later, "+inf")
  for _, one in ipairs(behind) do
    moved = moved + hasten(one)
  end
end
return tell(K, ARGV[2], now_ms, { "ok", now_ms, moved, left })
