--- Forward due messages into a list or a stream instead of delivering them. Each moves from the topic to the target
--- in one step. Groups and limits do not apply, because there is no delivery that could be settled. Messages before a
--- corrupt one are forwarded; the call that starts with it reports it.
--- KEYS[1..15] slot
--- KEYS[16] target, a list or a stream
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] maximum number of messages; a call sends 128 KiB of them or a single one
--- ARGV[5] "list" | "stream"
--- ARGV[6] approximate maximum length of the target, oldest dropped first; 0 = unlimited
--- Returns {"ok", now ms, next due ms (0 = none), sent} {"ok", now ms, next due ms, 0, record of the pause} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "lib/fence"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/schedule/next_due"
--- @include "topics/lib/schedule/rank"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/schedule/parse_ready"
--- @include "topics/lib/slot/budget"
--- @include "topics/lib/slot/history"
local K, p, target, kind = slot(KEYS), policy(ARGV[3]), KEYS[16], ARGV[5]
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end
local found = redis.call("TYPE", target).ok
if found ~= "none" and found ~= kind then
  return { "foreign", now_ms, target .. " holds a " .. found .. ", expected a " .. kind }
end
local paused = redis.call("HGET", K.meta, "paused")
local most, sent, triggers = paused and 0 or tonumber(ARGV[4]), 0, 0
local token, length = redis.call("HGET", K.meta, "fence"), 0
local problem = corrupt_number(K.meta, "fence", tonumber(token) or 0)
if problem then
  return { "foreign", now_ms, problem }
end

-- The first write goes to the target and is refused when the server is out of memory. Each message has a different token
-- because a consumer of the target recognizes a copy by it.
local function append_to_target(key, due, packed)
  token = fence(token, now_us)
  local entry = cmsgpack.pack({ token, key, due, packed })
  if kind == "list" then
    length = redis.call("RPUSH", target, entry)
  elseif tonumber(ARGV[6]) > 0 then
    redis.call("XADD", target, "MAXLEN", "~", ARGV[6], "*", "message", entry)
  else
    redis.call("XADD", target, "*", "message", entry)
  end
end

local function forward_message(key, due, member, packed, m)
  append_to_target(key, due, packed)
  redis.call("HDEL", K.messages, key)
  redis.call("ZREM", member and K.ready or K.scheduled, member or key)
  group_leave(K, m.group, key, p.group_limit)
  if p.history then
    note_transition(K, "forwarded", key, digits(token), m)
  end
  sent, triggers = sent + 1, triggers + m.count
end

-- The next due messages: key, due time, and member of the ready set if ranked; `names` holds their keys.
local candidates, names = {}, {}
if most > 0 and (p.ranked or redis.call("EXISTS", K.ready) == 1) then
  problem = rank_due(K, p, now_ms)
  for _, member in ipairs(redis.call("ZRANGE", K.ready, 0, most - 1)) do
    local due, key = parse_ready(member)
    candidates[#candidates + 1] = { key, due, member }
  end
elseif most > 0 then
  local due = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
  for i = 1, #due, 2 do
    candidates[#candidates + 1] = { due[i], tonumber(due[i + 1]) }
  end
end
for i, one in ipairs(candidates) do
  names[i] = one[1]
end
local accepted = count_within_budget(K, p, names, max_call_bytes, "messages")
for i = 1, accepted do
  local key, due, member = unpack(candidates[i], 1, 3)
  local packed = redis.call("HGET", K.messages, key)
  local m = due and validate_message(packed)
  problem = not packed and missing_entry(member and K.ready or K.scheduled, member or key) or not m and corrupt_entry(K.messages, key)
    or validate_group(K, m.group, p.group_limit)
  if problem then
    accepted = i - 1
    break
  end
  candidates[i][3], candidates[i][4], candidates[i][5] = member or false, packed, m
end
if problem and accepted == 0 then
  return { "foreign", now_ms, problem }
end
for i = 1, accepted do
  forward_message(unpack(candidates[i], 1, 5))
end
if sent > 0 then
  redis.call("HSET", K.meta, "fence", digits(token))
  add_counters(K, { forwarded = sent, forwarded_triggers = triggers })
  write_history(K, p, string.sub(ARGV[2], 1, 8), now_ms)
  local beyond = kind == "list" and tonumber(ARGV[6]) > 0 and length - tonumber(ARGV[6]) or 0
  if beyond > 0 then
    -- After the maximum was lowered, each call drops some of the rest.
    redis.call("LTRIM", target, math.min(beyond, sent + 1000), -1)
  end
end
local reply = { "ok", now_ms, next_due(K, now_ms, not paused and 0 or nil), sent }
if sent > 0 then
  remember_reply(K, ARGV[2], now_ms, reply)
elseif paused then
  reply[5] = paused
end
return reply
