--- Return the number of messages per state, since when messages are due, the largest blocked groups, and the slot's
--- counters. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = read a closed slot, too; "time" = only the time
--- Returns {"ok", now ms, scheduled, ready, waiting, blocked, in flight, dead, next due ms (0 = none), oldest due ms (0 =
---         none), 1 if it looked at a part of what waits, else 0, number of groups, then three a group: name, messages,
---         oldest due ms, then two a counter: name, value}
---         {"ok", now ms}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/slot/header"
--- @include "topics/lib/slot/budget"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not (closed and ARGV[2] == "1") then
  return { "foreign", now_ms, problem }
elseif ARGV[2] == "time" then
  return { "ok", now_ms }
end
-- How much a call looks at. The ready and the blocked messages are in order of rank: the first of each rank is the oldest.
local most_groups, most_ranks, sampled = 128, 250, false

local function oldest_ready()
  local oldest, from = now_ms, "-inf"
  for _ = 1, most_ranks do
    local first = redis.call("ZRANGEBYSCORE", K.ready, from, "+inf", "WITHSCORES", "LIMIT", 0, 1)
    if not first[1] then
      return oldest
    end
    oldest, from = math.min(oldest, tonumber(string.sub(first[1], 1, 15)) or now_ms), "(" .. first[2]
  end
  sampled = true
  return oldest
end

-- Return the earliest due time of the messages that wait for a delivery of their key. Its key has a lease.
local function oldest_waiting(waiting)
  local keys, oldest = redis.call("ZRANGE", K.leases, 0, 499), math.huge
  local n = count_within_budget(K, { merge = {} }, keys, max_call_bytes, "next")
  for _, packed in ipairs(n > 0 and redis.call("HMGET", K.next, unpack(keys, 1, n)) or {}) do
    if packed then
      local _, _, due = read_header(packed)
      oldest, waiting = math.min(oldest, due or math.huge), waiting - 1
    end
  end
  sampled = sampled or waiting > 0
  return oldest
end

local function first_blocked(from)
  return redis.call("ZRANGEBYLEX", K.group_waiting, from, "+", "LIMIT", 0, 1)[1]
end

-- Return the groups with blocked messages: name, number of messages and their earliest due time. The first half of them are
-- those in front. If there are more, the other half are found by members at equal distances: so a group is found if it has
-- its share of the messages that remain.
local function blocked_groups(blocked)
  local groups, known, ranks = {}, {}, most_ranks
  -- Add a group by its first member. Return the first member of the next group, and the number of messages.
  local function add(first)
    local name = string.match(first, "^[^%z]*")
    local prefix, member, oldest = name .. "\0", first, now_ms
    repeat
      local at = string.find(member, "\0", #prefix + 1, true)
      oldest = math.min(oldest, at and tonumber(string.sub(member, at + 1, at + 15)) or now_ms)
      local last = ranks > 0 and at and string.sub(member, 1, at - 1) or name
      ranks, sampled = math.max(0, ranks - 1), sampled or ranks == 0
      member = first_blocked("[" .. last .. "\1")
    until not member or string.sub(member, 1, #prefix) ~= prefix
    local n = redis.call("ZLEXCOUNT", K.group_waiting, "[" .. prefix, "(" .. name .. "\1")
    known[name], groups[#groups + 1] = true, { name = name, n = n, oldest = oldest }
    return member, n
  end

  local first, half, seen, n = first_blocked("-"), most_groups / 2, 0, nil
  while first and #groups < half do
    first, n = add(first)
    seen = seen + n
  end
  for i = 0, first and half - 1 or -1 do
    local at = seen + math.floor(i * (blocked - seen) / half)
    local name = string.match(redis.call("ZRANGE", K.group_waiting, at, at)[1], "^[^%z]*")
    if not known[name] then
      add(first_blocked("[" .. name))
    end
    sampled = true
  end
  return groups
end

local scheduled, ready = redis.call("ZCARD", K.scheduled), redis.call("ZCOUNT", K.scheduled, "-inf", now_ms)
local ranked, blocked = redis.call("ZCARD", K.ready), redis.call("ZCARD", K.group_waiting)
local waiting = redis.call("HLEN", K.next)
local next_due = tonumber(redis.call("ZRANGE", K.scheduled, 0, 0, "WITHSCORES")[2]) or math.huge
if ranked > 0 then
  next_due = math.min(next_due, oldest_ready())
end
local oldest, groups = next_due, blocked > 0 and blocked_groups(blocked) or {}
if waiting > 0 then
  oldest = math.min(oldest, oldest_waiting(waiting))
end
local function is_larger(one, other)
  return one.n > other.n or one.n == other.n and one.name < other.name
end
-- The five largest groups, and the one with the oldest message.
table.sort(groups, is_larger)
local eldest, shown = 1, math.min(5, #groups)
for i, group in ipairs(groups) do
  oldest = math.min(oldest, group.oldest)
  eldest = group.oldest < groups[eldest].oldest and i or eldest
end
if eldest > 5 then
  groups[6], shown = groups[eldest], 6
end
local reply = {
  "ok", now_ms, scheduled - ready, ready + ranked, waiting, blocked, redis.call("ZCARD", K.leases), redis.call("ZCARD", K.dead),
  next_due < math.huge and next_due or 0, oldest <= now_ms and oldest or 0, sampled and 1 or 0, shown,
}
for i = 1, shown do
  local at, group = #reply, groups[i]
  reply[at + 1], reply[at + 2], reply[at + 3] = group.name, group.n, group.oldest
end
for _, value in ipairs(redis.call("HGETALL", K.meta)) do
  reply[#reply + 1] = value
end
return reply
