--- End deliveries: done, try again, dead, never started, or not possible yet (try later, not counted as an attempt); or done but for
--- some of the items, which are tried again ("part").
--- What waited behind each is scheduled in the same step.
--- A delivery that is not this owner's any more is left alone and answered "lost".
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4..] five a delivery: "ack" | "nack" | "bury" | "return" | "defer" | "part"; key; fence; delay before the next attempt, ms;
---         failure, of "part" what failed (lib/part)
--- Returns {"ok", now ms, next due ms (0 = none), then one a delivery: "ok" | "dead" | "cancelled" | "lost"}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/delivery"
--- @include "lib/restore"
--- @include "lib/finish"
--- @include "lib/vacate"
--- @include "lib/message"
--- @include "lib/policy"
--- @include "lib/bury"
--- @include "lib/part"
--- @include "lib/count"
--- @include "lib/next_due"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end

local done = {}
local function add(name, n)
  done[name] = (done[name] or 0) + n
end

local function dead(key, d, m, failure)
  add("buried", 1)
  add("buried_triggers", m[message.count])
  bury(K, p, key, d[delivery.message], failure, d[delivery.fence], now_ms)
  finish(K, p, key, m)
  return "dead"
end

-- What is done ends together, after everything else: that is most of what comes here.
local acked = {}
local function ack(key, d)
  acked[#acked + 1] = key
  add("acked", 1)
  add("acked_triggers", d[delivery.count])
end
local function end_acked(groups)
  if #acked == 0 then
    return
  end
  redis.call("ZREM", K.lease, unpack(acked))
  redis.call("HDEL", K.flight, unpack(acked))
  for i, waiting in ipairs(redis.call("HMGET", K.pending, unpack(acked))) do
    if waiting then
      redis.call("ZADD", K.due, cmsgpack.unpack(waiting)[message.due], acked[i])
    end
  end
  for _, key in ipairs(acked) do
    vacate(K, groups[key], key, p.group_limit)
  end
end

local function settle(verb, key, d, delay, failure)
  local m = cmsgpack.unpack(d[delivery.message])
  redis.call("ZREM", K.lease, key)
  redis.call("HDEL", K.flight, key)
  if verb == "part" then
    local items, acked
    failure, items, acked = part(p, m, failure)
    add("partial", 1)
    add("items_failed", items)
    add("acked_triggers", acked)
    d[delivery.message] = cmsgpack.pack(m)
  end
  if verb == "bury" then
    return dead(key, d, m, failure)
  elseif d[delivery.cancelled] == 1 then
    add("cancelled", 1)
    add("cancelled_triggers", m[message.count])
    finish(K, p, key, m)
    return "cancelled"
  elseif verb == "return" then
    add("returned", 1)
    m[message.attempts] = m[message.attempts] - 1
    add("folded", restore(K, p, key, m, m[message.due], m[message.why]))
    return "ok"
  end
  if verb == "defer" then
    add("deferred", 1)
    m[message.attempts], m[message.pinned] = m[message.attempts] - 1, 0
    add("folded", restore(K, p, key, m, now_ms + delay, "retry"))
    return "ok"
  end
  add("nacked", 1)
  if m[message.attempts] >= p.attempts then
    return dead(key, d, m, failure)
  end
  m[message.failure], m[message.pinned] = failure, 0
  add("folded", restore(K, p, key, m, now_ms + delay, "retry"))
  return "ok"
end

-- Of each key what is in flight, and once it has ended here, false: a delivery ends once, whatever else is said of it.
local live, wanted = {}, {}
for i = 4, #ARGV, 5 do
  wanted[#wanted + 1] = ARGV[i + 1]
end
for i, d in ipairs(redis.call("HMGET", K.flight, unpack(wanted))) do
  live[wanted[i]] = d and cmsgpack.unpack(d)
end
-- A write that frees memory comes first: a server that has none left refuses a script that begins with any other.
redis.call("HDEL", K.facts, "")
local reply, groups = { "ok", now_ms, 0 }, {}
for i = 4, #ARGV, 5 do
  local key = ARGV[i + 1]
  local d = live[key]
  if d and digits(d[delivery.fence]) == ARGV[i + 2] then
    live[key] = false
    if ARGV[i] == "ack" then
      reply[#reply + 1] = "ok"
      groups[key] = d[delivery.group]
      ack(key, d)
    else
      reply[#reply + 1] = settle(ARGV[i], key, d, tonumber(ARGV[i + 3]), ARGV[i + 4])
    end
  else
    reply[#reply + 1] = "lost"
    add("lost", 1)
  end
end
end_acked(groups)
count(K, done)
reply[3] = next_due(K, now_ms, 0)
if p.limited and reply[3] > 0 and reply[3] <= now_ms then
  -- The slot was closed by its limit, and nobody sleeps until it opens.
  redis.pcall("PUBLISH", K.due, digits(now_ms))
end
return tell(K, ARGV[2], now_ms, reply)
