--- Send what is due on, into a list or a stream, instead of handing it out: out of the topic and into the target in one step.
--- Groups and limits do not apply: there is no delivery whose end could be waited for. What stands before one that cannot be read goes;
--- the call that begins with it says so.
--- KEYS[1..14] slot
--- KEYS[15] target, a list or a stream
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4] most messages to send, and 128 KiB of them, or one
--- ARGV[5] "list" | "stream"
--- ARGV[6] about how many entries the target keeps, oldest dropped first; 0 = all
--- Returns {"ok", now ms, next due ms (0 = none), sent} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fence"
--- @include "lib/digits"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/message"
--- @include "lib/policy"
--- @include "lib/count"
--- @include "lib/next_due"
--- @include "lib/rank"
--- @include "lib/vacate"
--- @include "lib/portion"
local K, p, target, kind = slot(KEYS), policy(ARGV[3]), KEYS[15], ARGV[5]
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local problem = wrong(K)
local found = redis.call("TYPE", target).ok
if not problem and found ~= "none" and found ~= kind then
  problem = target .. " holds a " .. found .. ", expected a " .. kind
end
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end
local paused = redis.call("HEXISTS", K.facts, "paused") == 1
local most, sent, triggers = paused and 0 or tonumber(ARGV[4]), 0, 0
local last = redis.call("HGET", K.facts, "fence")

-- The first write, into the target, is one that a server without memory refuses.
local function push(key, due, m)
  last = fence(last, now_us)
  local entry = cmsgpack.pack({ last, key, due, cmsgpack.pack(m) })
  if kind == "list" then
    redis.call("RPUSH", target, entry)
  elseif tonumber(ARGV[6]) > 0 then
    redis.call("XADD", target, "MAXLEN", "~", ARGV[6], "*", "message", entry)
  else
    redis.call("XADD", target, "*", "message", entry)
  end
end

local function send(key, due, member, m)
  if due ~= m[message.due] then
    m[message.due], m[message.why] = due, "flush"
  end
  m[message.attempts] = m[message.attempts] + 1
  push(key, due, m)
  redis.call("HDEL", K.pending, key)
  redis.call("ZREM", member and K.ready or K.due, member or key)
  vacate(K, m[message.group], key, p.group_limit)
  sent, triggers = sent + 1, triggers + m[message.count]
end

-- What is next: its key, when it is due, and as what it stands among the ready ones; its key alone, too.
local going, names = {}, {}
if most > 0 and (p.ranked or redis.call("EXISTS", K.ready) == 1) then
  problem = rank(K, p, now_ms)
  for _, member in ipairs(redis.call("ZRANGE", K.ready, 0, most - 1)) do
    going[#going + 1] = { string.sub(member, 16), tonumber(string.sub(member, 1, 15)), member }
  end
elseif most > 0 then
  local due = redis.call("ZRANGEBYSCORE", K.due, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
  for i = 1, #due, 2 do
    going[#going + 1] = { due[i], tonumber(due[i + 1]) }
  end
end
for i, one in ipairs(going) do
  names[i] = one[1]
end
local goes = portion(K, p, names, most_bytes, "pending")
for i = 1, goes do
  local key, due, member = unpack(going[i], 1, 3)
  local packed = redis.call("HGET", K.pending, key)
  local m = due and sound_message(packed)
  problem = not packed and vacant(member and K.ready or K.due, member or key) or not m and unsound(K.pending, key)
    or sound(K, m[message.group], p.group_limit)
  if problem then
    goes = i - 1
    break
  end
  going[i][4] = m
end
if problem and goes == 0 then
  return { "foreign", now_ms, problem }
end
for i = 1, goes do
  send(unpack(going[i], 1, 4))
end
if sent > 0 then
  redis.call("HSET", K.facts, "fence", digits(last))
  count(K, { forwarded = sent, forwarded_triggers = triggers })
  if kind == "list" and tonumber(ARGV[6]) > 0 then
    redis.call("LTRIM", target, -tonumber(ARGV[6]), -1)
  end
end
local reply = { "ok", now_ms, next_due(K, now_ms, not paused and 0 or nil), sent }
if sent > 0 then
  tell(K, ARGV[2], now_ms, reply)
end
return reply
