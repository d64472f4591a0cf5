--- Take in a batch of another slot, once, while this slot is closed by the same change.
--- What two slots held of one key becomes one: pending messages merge; of two deliveries the second counts as lapsed. It stays inside of
--- the group it then has only if it was, and need not wait longer there than before.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- ARGV[3] policy (lib/policy)
--- ARGV[4] the slot it comes from
--- ARGV[5] number of the batch; 0 = replies given lately, which may be taken in twice
--- ARGV[6..] five an entry: kind (as in unload, or t, a reply); name; number (of a reply its half minute, of an event id when to forget
---         it); value; "1" if it is inside of its group
--- Returns {"ok", now ms} {"open", now ms} (another change closed or opened it) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/message"
--- @include "lib/delivery"
--- @include "lib/policy"
--- @include "lib/restore"
--- @include "lib/unplace"
--- @include "lib/vacate"
--- @include "lib/advance"
--- @include "lib/sortable"
--- @include "lib/lined"
--- @include "lib/place"
--- @include "lib/occupy"
--- @include "lib/events"
--- @include "lib/digits"
--- @include "lib/letter_id"
--- @include "lib/weighed"
--- @include "lib/count"
local K, p, source, number = slot(KEYS), policy(ARGV[3]), "from:" .. ARGV[4], tonumber(ARGV[5])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = wrong(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
elseif closed ~= ARGV[2] then
  return { "open", now_ms }
end
if number > 0 and number <= (tonumber(redis.call("HGET", K.facts, source)) or 0) then
  return { "ok", now_ms }
end
local done = {}
local function add(name, n)
  done[name] = (done[name] or 0) + n
end

local function enter(group, key, inside)
  if inside == "1" then
    occupy(K, group, key, math.huge)
  end
end

-- A message and the pending one that another slot had of its key become one.
local function unite(key, m, inside, flying)
  local group, waiting = m[message.group], cmsgpack.unpack(redis.call("HGET", K.pending, key))
  local stood = waiting[message.due]
  add("folded", restore(K, p, key, m, m[message.due], m[message.why]))
  if flying then
    return
  end
  m = cmsgpack.unpack(redis.call("HGET", K.pending, key))
  if m[message.pinned] == 1 or m[message.group] ~= group and m[message.due] > stood then
    -- No group waits for a time that its caller named, nor for that of a message which was not inside.
    vacate(K, m[message.group], key, p.group_limit)
  elseif m[message.group] == group then
    enter(group, key, inside)
  end
end

local function stand(kind, key, at, m)
  if kind == "b" then
    place(K, key, m)
  elseif kind == "p" then
    redis.call("ZADD", K.due, at, key)
  elseif kind == "r" then
    redis.call("ZADD", K.ready, at, sortable(m[message.due], key))
  else
    redis.call("ZADD", K.line, 0, lined(key, m))
  end
end

local function pend(kind, key, at, packed, inside)
  local m, flying = cmsgpack.unpack(packed), redis.call("HEXISTS", K.flight, key) == 1
  if kind == "p" and tonumber(at) ~= m[message.due] then
    m[message.due], m[message.why] = tonumber(at), "flush"
    packed = cmsgpack.pack(m)
  end
  local group = m[message.group]
  if redis.call("HEXISTS", K.pending, key) == 1 then
    unite(key, m, inside, flying)
  else
    redis.call("HSET", K.pending, key, weighed(K, packed))
    if not flying then
      stand(kind, key, at, m)
      enter(group, key, inside)
    end
  end
  if flying and (kind == "p" or kind == "r") then
    -- It waits now for a delivery of another group: its own does not, and its line, which came first, goes on.
    advance(K, group, p.group_limit)
  end
end

local function fly(key, ends, packed, inside)
  local m = cmsgpack.unpack(cmsgpack.unpack(packed)[delivery.message])
  local group = m[message.group]
  if redis.call("HEXISTS", K.flight, key) == 1 then
    add("lapsed", 1)
    add("folded", restore(K, p, key, m, now_ms, "retry"))
    advance(K, group, p.group_limit)
    return
  end
  local waiting = redis.call("HGET", K.pending, key)
  if waiting then
    waiting = cmsgpack.unpack(waiting)
    unplace(K, key, waiting)
    vacate(K, waiting[message.group], key, p.group_limit)
  end
  redis.call("HSET", K.flight, key, weighed(K, packed))
  redis.call("ZADD", K.lease, ends, key)
  enter(group, key, inside)
end

local function entomb(id, died, packed)
  local letter = cmsgpack.unpack(packed)
  letter[5] = letter_id(K, tonumber(id))
  redis.call("HSET", K.grave, digits(letter[5]), weighed(K, cmsgpack.pack(letter)))
  redis.call("ZADD", K.dead, died, digits(letter[5]))
end

local function recollect(name, expires, value)
  local known = tonumber(redis.call("ZSCORE", K.fade, name)) or 0
  local held = redis.call("HGET", K.memo, name)
  if held and string.sub(name, 1, 1) == "v" and known > now_ms
    and (tonumber(string.match(held, "^[^ ]+")) or -math.huge) > tonumber(string.match(value, "^[^ ]+")) then
    value = held
  end
  redis.call("HSET", K.memo, name, value)
  redis.call("ZADD", K.fade, math.max(known, tonumber(expires)), name)
end

local function learn(name, value)
  if name == "fence" or name == "rate" or name == "lease" then
    local known = tonumber(redis.call("HGET", K.facts, name)) or 0
    redis.call("HSET", K.facts, name, digits(math.max(known, tonumber(value) or 0)))
  elseif name == "paused" then
    redis.call("HSETNX", K.facts, name, value)
  else
    count(K, { [name] = tonumber(value) })
  end
end

local function retell(request, half, packed)
  local log = tonumber(half) % 2
  local period = tonumber(redis.call("HGET", K.told[log], "")) or 0
  if period < tonumber(half) then
    redis.call("DEL", K.told[log])
    redis.call("HSET", K.told[log], "", half)
    redis.call("PEXPIRE", K.told[log], 120000)
  end
  if period <= tonumber(half) then
    redis.call("HSET", K.told[log], request, packed)
  end
end

local seen, serial = events(K), tonumber(redis.call("HGET", K.facts, "flushed")) or 0
for i = 6, #ARGV, 5 do
  local kind, m = ARGV[i], nil
  if kind == "f" then
    m = sound_message(cmsgpack.unpack(ARGV[i + 3])[delivery.message])
  elseif kind == "d" then
    serial = math.max(serial, cmsgpack.unpack(cmsgpack.unpack(ARGV[i + 3])[2])[message.serial])
  elseif not string.find(kind, "^[dmcte]$") then
    m = sound_message(ARGV[i + 3])
  end
  problem = m and (broken(K, p, { ARGV[i + 1] }) or sound(K, m[message.group], p.group_limit))
  if kind == "e" and not readable(seen, bucket_of(seen, ARGV[i + 1])) then
    problem = seen.problem
  end
  if problem then
    return { "foreign", now_ms, problem }
  end
  serial = m and math.max(serial, m[message.serial]) or serial
end
-- The first write is one that a server without memory refuses, whole.
redis.call("HSET", K.facts, source, math.max(number, tonumber(redis.call("HGET", K.facts, source)) or 0))
for i = 6, #ARGV, 5 do
  local kind, name, at, value, inside = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  if kind == "f" then
    fly(name, at, value, inside)
  elseif kind == "d" then
    entomb(name, at, value)
  elseif kind == "m" then
    recollect(name, at, value)
  elseif kind == "e" and tonumber(at) > now_ms then
    witness(seen, name, tonumber(at), now_ms)
  elseif kind == "c" then
    learn(name, value)
  elseif kind == "t" then
    retell(name, at, value)
  elseif kind ~= "e" then
    pend(kind, name, at, value, inside)
  end
end
store_events(seen)
if serial > 0 then
  -- This slot numbers its own triggers from below on: these cannot be told from what is flushed here later.
  redis.call("HSET", K.facts, "flushed", digits(serial))
end
count(K, done)
return { "ok", now_ms }
