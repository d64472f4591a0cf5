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
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/slot/message"
--- @include "topics/lib/events"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/load_entries"
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
