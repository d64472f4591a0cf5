--- Take what is due: first put back deliveries whose lease lapsed, then hand out due messages, each with a fencing token, a lease and
--- its attempt counted.
--- KEYS[1..11] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] most messages to take
--- ARGV[4] lease, ms
--- ARGV[5] attempts allowed
--- ARGV[6] merge policy, packed
--- ARGV[7] retention of dead letters, ms
--- ARGV[8] dead letters kept at most
--- Returns {"ok", now ms, next due ms (0 = none), lapsed, then four a delivery: key, fence, due ms, message}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fence"
--- @include "lib/digits"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/delivery"
--- @include "lib/restore"
--- @include "lib/promote"
--- @include "lib/bury"
--- @include "lib/count"
--- @include "lib/next_due"
local K, spec = slot(KEYS), cmsgpack.unpack(ARGV[6])
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end

-- The deliveries of a request, as far as they are still its own.
local function reply_of(keys, lapsed)
  local reply = { "ok", now_ms, next_due(K), lapsed }
  for _, key in ipairs(keys) do
    local d = redis.call("HGET", K.flight, key)
    d = d and cmsgpack.unpack(d)
    if d and d[delivery.request] == ARGV[2] then
      reply[#reply + 1] = key
      reply[#reply + 1] = d[delivery.fence]
      reply[#reply + 1] = d[delivery.due]
      reply[#reply + 1] = d[delivery.message]
    end
  end
  return reply
end

local given = told(K, ARGV[2], now_ms)
if given then
  return reply_of(given[1], given[2])
end

local done = { taken = 0, lapsed = 0 }
local function add(name, n)
  done[name] = (done[name] or 0) + n
end

local silent = "lease lapsed: its worker vanished or stalled"
-- When to try again what fell silent: at once, but the second time at some moment of a lease, apart from what was in
-- flight with it. Else a message that kills its workers takes the same neighbours along until all of them are dead.
local function again(key, d, m)
  if m[message.attempts] < 2 then
    return now_ms
  end
  local drawn = string.sub(redis.sha1hex(key .. digits(d[delivery.fence])), 1, 8)
  return now_ms + tonumber(drawn, 16) % tonumber(ARGV[4])
end

-- A delivery whose owner fell silent: to be tried again, or dead.
local function reclaim(key)
  local d = cmsgpack.unpack(redis.call("HGET", K.flight, key))
  local m = cmsgpack.unpack(d[delivery.message])
  redis.call("ZREM", K.lease, key)
  redis.call("HDEL", K.flight, key)
  done.lapsed = done.lapsed + 1
  if d[delivery.cancelled] == 1 then
    add("cancelled", 1)
    add("cancelled_triggers", m[message.count])
    promote(K, key)
  elseif m[message.attempts] >= tonumber(ARGV[5]) then
    add("buried", 1)
    add("buried_triggers", m[message.count])
    bury(K, key, d[delivery.message], silent, d[delivery.fence], now_ms, tonumber(ARGV[7]), tonumber(ARGV[8]))
    promote(K, key)
  else
    m[message.failure] = silent
    add("folded", restore(K, spec, key, m, again(key, d, m), "retry"))
  end
end

for _, key in ipairs(redis.call("ZRANGEBYSCORE", K.lease, "-inf", now_ms, "LIMIT", 0, 100)) do
  reclaim(key)
end

local last = redis.call("HGET", K.facts, "fence")
local found = redis.call("ZRANGEBYSCORE", K.due, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, tonumber(ARGV[3]))
local keys, lease_end = {}, now_ms + tonumber(ARGV[4])
for i = 1, #found, 2 do
  local key, due = found[i], tonumber(found[i + 1])
  local m = cmsgpack.unpack(redis.call("HGET", K.pending, key))
  last = fence(last, now_us)
  m[message.attempts] = m[message.attempts] + 1
  if due ~= m[message.due] then
    m[message.due], m[message.why] = due, "flush"
  end
  -- First write: refused whole when the server is out of memory.
  redis.call("HSET", K.flight, key, cmsgpack.pack({ last, ARGV[2], 0, cmsgpack.pack(m), due }))
  redis.call("ZADD", K.lease, lease_end, key)
  redis.call("HDEL", K.pending, key)
  redis.call("ZREM", K.due, key)
  keys[#keys + 1] = key
end
done.taken = #keys
if #keys > 0 then
  redis.call("HSET", K.facts, "fence", digits(last))
end
count(K, done)
if #keys > 0 or done.lapsed > 0 then
  tell(K, ARGV[2], now_ms, { keys, done.lapsed })
end
return reply_of(keys, done.lapsed)
