--- Load a batch of another slot, once, while this slot is closed by the same change. Data of a key from two slots is
--- merged. Pending messages merge; the second of two deliveries counts as lapsed. A message stays active in its group
--- only if it was active before, and waits there no longer than before.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] source slot
--- ARGV[5] number of the batch; 0 = stored replies, which may be loaded twice
--- ARGV[6..] five an entry: kind (as in unload, or t, a reply); name; number (half minute of a reply, expiry of an event id);
---         value; "1" if active in its group
--- Returns {"ok", now ms} {"open", now ms} (another change closed or reopened it) {"foreign", now ms, problem}
--- Keys: hash
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/slot/message"
--- @include "topics/lib/slot/lease_times"
--- @include "topics/lib/events"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/schedule/requeue"
--- @include "topics/lib/dead_letters"
-- Load one entry of another slot (topics/reshard/load).
local function group_reenter(K, group, key, inside)
  if inside == "1" then
    group_enter(K, group, key)
  end
end

-- Merge a message with the pending one that another slot had of its key.
local function merge_pending(K, p, add_count, key, m, inside, hash)
  local group, waiting = m.group, decode_message(redis.call("HGET", hash, key))
  local stood = waiting.due
  add_count("folded", requeue(K, p, key, m, m.due, m.why))
  if hash == K.next then
    return
  end
  m = decode_message(redis.call("HGET", hash, key))
  if m.pinned == 1 or m.group ~= group and m.due > stood then
    -- No group waits for a time set by the caller, nor for a message that was not active in it.
    group_leave(K, m.group, key, p.group_limit)
  elseif m.group == group then
    group_reenter(K, group, key, inside)
  end
end

local function put_back(K, kind, key, at, m)
  if kind == "b" or kind == "s" then
    schedule(K, key, m)
  elseif kind == "p" then
    redis.call("ZADD", K.scheduled, at, key)
  elseif kind == "r" then
    redis.call("ZADD", K.ready, at, ready_member(key, m))
  else
    redis.call("ZADD", K.group_waiting, 0, waiting_member(key, m))
  end
end

local function load_pending(K, p, add_count, kind, key, at, packed, inside)
  local m, hash = decode_message(packed), pending_hash(K, key)
  local flying = hash == K.next
  if kind == "p" and tonumber(at) ~= m.due then
    m.due, m.why = tonumber(at), reason.flush
    packed = encode_message(m)
  end
  local group = m.group
  if redis.call("HEXISTS", hash, key) == 1 then
    merge_pending(K, p, add_count, key, m, inside, hash)
  else
    redis.call("HSET", hash, key, track_large(K, packed))
    if not flying then
      put_back(K, kind, key, at, m)
      group_reenter(K, group, key, inside)
    end
  end
  if flying and (kind == "p" or kind == "r") then
    -- The key now waits for a delivery of another group. Its own group does not wait for it, and the next member of
    -- that group goes on.
    group_promote(K, group, p.group_limit)
  end
end

local function load_delivery(K, p, now_ms, add_count, key, ends, packed, inside)
  local entry, delivered = unpack(cmsgpack.unpack(packed))
  local m = decode_message(delivered)
  local group = m.group -- merging changes it
  if redis.call("ZSCORE", K.leases, key) then
    add_count("lapsed", 1)
    m.attempts = m.attempts + 1
    add_count("folded", requeue(K, p, key, m, now_ms, reason.retry))
    group_promote(K, group, p.group_limit)
    return
  end
  local waiting = redis.call("HGET", K.messages, key)
  if waiting then
    redis.call("HSET", K.next, key, waiting)
    waiting = decode_message(waiting)
    unschedule(K, key, waiting)
    group_leave(K, waiting.group, key, p.group_limit)
  end
  redis.call("HSET", K.inflight, key, entry)
  redis.call("HSET", K.messages, key, track_large(K, delivered))
  redis.call("ZADD", K.leases, lease_start(K, tonumber(ends)), key)
  group_reenter(K, group, key, inside)
end

local function load_dead_letter(K, id, died, packed)
  local letter = cmsgpack.unpack(packed)
  letter[5] = tonumber(id)
  store_dead_letter(K, letter, died)
end

local function load_fact(K, now_ms, name, expires, value)
  local current = tonumber(redis.call("ZSCORE", K.dedup_expiry, name)) or 0
  local held = redis.call("HGET", K.dedup, name)
  if held and string.sub(name, 1, 1) == "v" and current > now_ms
    and (tonumber(string.match(held, "^[^ ]+")) or -math.huge) > tonumber(string.match(value, "^[^ ]+")) then
    value = held
  end
  redis.call("HSET", K.dedup, name, value)
  redis.call("ZADD", K.dedup_expiry, math.max(current, tonumber(expires)), name)
end

local function load_counter(K, name, value)
  if name == "fence" or name == "rate" or name == "lease" then
    local current = tonumber(redis.call("HGET", K.meta, name)) or 0
    redis.call("HSET", K.meta, name, digits(math.max(current, tonumber(value) or 0)))
  elseif name == "paused" then
    redis.call("HSETNX", K.meta, name, value)
  else
    add_counters(K, { [name] = tonumber(value) })
  end
end

local function load_reply(K, request, half, packed)
  local log = tonumber(half) % 2
  local period = tonumber(redis.call("HGET", K.replies[log], "")) or 0
  if period < tonumber(half) then
    redis.call("UNLINK", K.replies[log])
    redis.call("HSET", K.replies[log], "", half)
    redis.call("PEXPIRE", K.replies[log], 120000)
  end
  if period <= tonumber(half) then
    redis.call("HSET", K.replies[log], request, packed)
  end
end

local K, p, source, number = slot(KEYS), policy(ARGV[3]), "from:" .. ARGV[4], tonumber(ARGV[5])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
elseif closed ~= ARGV[2] then
  return { "open", now_ms }
end
if number > 0 and number <= (tonumber(redis.call("HGET", K.meta, source)) or 0) then
  return { "ok", now_ms }
end
local done = {}
local function add_count(name, n)
  done[name] = (done[name] or 0) + n
end

local seen, serial, expires = load_events(K), tonumber(redis.call("HGET", K.meta, "flushed")) or 0, 0
for i = 6, #ARGV, 5 do
  local kind, m = ARGV[i], nil
  if kind == "f" then
    m = validate_message(cmsgpack.unpack(ARGV[i + 3])[2])
  elseif kind == "d" then
    serial = math.max(serial, decode_message(cmsgpack.unpack(ARGV[i + 3])[2]).serial)
  elseif not string.find(kind, "^[dmcte]$") then
    m = validate_message(ARGV[i + 3])
  end
  problem = m and (validate_keys(K, p, { ARGV[i + 1] }) or validate_group(K, m.group, p.group_limit))
  if kind == "e" and not check_bucket(seen, bucket_of(seen, ARGV[i + 1])) then
    problem = seen.problem
  end
  if problem then
    return { "foreign", now_ms, problem }
  end
  serial = m and math.max(serial, m.serial) or serial
end
-- The first write is one that is refused as a whole when the server is out of memory.
redis.call("HSET", K.meta, source, math.max(number, tonumber(redis.call("HGET", K.meta, source)) or 0))
for i = 6, #ARGV, 5 do
  local kind, name, at, value, inside = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  if kind == "f" then
    load_delivery(K, p, now_ms, add_count, name, at, value, inside)
  elseif kind == "d" then
    load_dead_letter(K, name, at, value)
  elseif kind == "m" then
    load_fact(K, now_ms, name, at, value)
    expires = math.max(expires, tonumber(at))
  elseif kind == "e" and tonumber(at) > now_ms then
    add_event(seen, name, tonumber(at), now_ms)
    expires = math.max(expires, tonumber(at))
  elseif kind == "c" then
    load_counter(K, name, value)
  elseif kind == "t" then
    load_reply(K, name, at, value)
  elseif kind ~= "e" then
    load_pending(K, p, add_count, kind, name, at, value, inside)
  end
end
store_events(seen)
if expires > now_ms then
  extend_lifetime(K, expires - now_ms, true)
end
if serial > 0 then
  -- This slot's own serials start lower, so loaded messages must count as flushed.
  redis.call("HSET", K.meta, "flushed", digits(serial))
end
add_counters(K, done)
return { "ok", now_ms }
