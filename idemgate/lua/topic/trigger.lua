--- Put triggers of one slot into a topic: each makes a pending message or merges into the one of its key.
--- A key in flight gets a new pending message, never merged into the running one.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4..] seven a trigger: key; when ("", "a" + ms since the epoch, "d" + ms from now); priority or "" (as it is, or 0); group or "";
---         version or ""; event id (lib/events) or ""; accumulator
--- Returns {"ok", now ms, then two a trigger: "scheduled" | "merged" | "replaced" | "dropped" | "duplicate", due ms (0 = none)}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/fold"
--- @include "lib/place"
--- @include "lib/unplace"
--- @include "lib/advance"
--- @include "lib/vacate"
--- @include "lib/policy"
--- @include "lib/window"
--- @include "lib/when"
--- @include "lib/remember"
--- @include "lib/recall"
--- @include "lib/events"
--- @include "lib/fade"
--- @include "lib/count"
--- @include "lib/head"
--- @include "lib/hint"
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

-- Says whether this trigger counts. What is remembered says its group, too: it decides to which slot it would have to go.
local seen
local function admit(key, version, event, group)
  if event ~= "" and witnessed(seen, event, now_ms) then
    return "duplicate"
  end
  if version ~= "" then
    local held = recall(K, "v" .. key, now_ms)
    if held and tonumber(version) < tonumber(string.match(held, "^[^ ]+")) then
      return "dropped"
    end
  end
  if p.leading and recall(K, "k" .. key, now_ms) then
    if p.quiet then
      remember(K, "k" .. key, group, now_ms + p.quiet)
    end
    return "dropped"
  end
end

local function note(key, version, event, due, group)
  if event ~= "" then
    witness(seen, event, math.max(now_ms, due) + p.remember, now_ms)
  end
  if version ~= "" then
    remember(K, "v" .. key, group == "" and version or version .. " " .. group, now_ms + p.remember)
  end
  if p.leading then
    remember(K, "k" .. key, group, now_ms + (p.window or p.quiet))
  end
end

-- Where a message stands is given by these; as long as they stay, it is not touched.
local function moved(old, new)
  return old[message.due] ~= new[message.due] or old[message.priority] ~= new[message.priority]
    or old[message.group] ~= new[message.group]
end

local shifted = false
-- A pending message was changed: it goes where it now belongs. One that held its group between two attempts, and was given another
-- time by its caller, holds it no longer.
local function shift(key, old, stands, m, asked)
  if stands then
    if m[message.due] ~= stands then
      shifted = true
      redis.call("ZADD", K.due, m[message.due], key)
    end
  elseif moved(old, m) and unplace(K, key, old) then
    shifted = true
    place(K, key, m)
  end
  local later = asked or m[message.due] > (stands or old[message.due]) or old[message.group] ~= m[message.group]
  local other = old[message.priority] ~= m[message.priority]
  if old[message.group] == "" or not (later or other) or redis.call("HEXISTS", K.flight, key) == 1 then
    return
  end
  shifted = true
  if later then
    vacate(K, old[message.group], key, p.group_limit)
  else
    -- It may have been the first of its group to go, and be so no more.
    advance(K, m[message.group], p.group_limit)
  end
end

-- What is pending of the keys named here, read and unpacked once; and what is to be written of them, together at the end.
local pending, changed, scheduled, standing = {}, {}, {}, {}
local before, earliest, flying = head(K), nil, redis.call("EXISTS", K.flight) == 1
local function schedule_all()
  if #scheduled > 0 then
    redis.call("ZADD", K.due, unpack(scheduled))
    scheduled, standing = {}, {}
  end
end
local function write_all()
  local words = {}
  for key in pairs(changed) do
    words[#words + 1] = key
    words[#words + 1] = cmsgpack.pack(pending[key])
  end
  if #words > 0 then
    redis.call("HSET", K.pending, unpack(words))
  end
  schedule_all()
  if seen then
    store_events(seen)
  end
end

-- A new message is scheduled, unless its key is in flight.
local function schedule(key, due)
  if not flying or redis.call("HEXISTS", K.flight, key) == 0 then
    scheduled[#scheduled + 1] = due
    scheduled[#scheduled + 1] = key
    standing[key] = true
    earliest = math.min(earliest or due, due)
  end
end

-- One trigger into the pending message of its key. Returns its receipt.
local function put(key, asked, priority, group, version, acc, serial)
  if standing[key] then
    schedule_all()
  end
  local old = pending[key]
  -- Where and when it stands: scheduled; nil or false behind a delivery of its key or its group, when it is ready, and for a new one.
  local stands = old and tonumber(redis.call("ZSCORE", K.due, key))
  local stood = old and {
    [message.due] = old[message.due], [message.priority] = old[message.priority], [message.group] = old[message.group],
    [message.rank] = old[message.rank],
  }
  local m = { 1, now_ms, now_ms, 0, 0, "", 0, version, acc, "", tonumber(priority) or "", group, serial, 0 }
  local receipt = "scheduled"
  if old then
    m = fold(p.merge, old, m)
    receipt = "merged"
    if stands and stands ~= m[message.due] then
      m[message.due], m[message.why] = stands, "flush"
    end
  end
  if asked then
    m[message.due], m[message.why], m[message.pinned] = asked, "time", 1
    receipt = old and "replaced" or receipt
  elseif m[message.pinned] == 0 and m[message.attempts] == 0 and m[message.why] ~= "retry" then
    -- A time that a caller named stands, and so does a retry's: neither is moved by the policy.
    m[message.due], m[message.why] = window(p, m, not old, now_ms)
  end
  pending[key], changed[key] = m, true
  if old then
    shift(key, stood, stands, m, asked)
  else
    schedule(key, m[message.due])
  end
  return receipt, m[message.due]
end

-- What is wrong with what one trigger will meet, or nil: its pending message, its groups, the version and the events that are remembered.
local function problem_of(key, packed, group, version, event)
  if event ~= "" then
    seen = seen or events(K)
    if not readable(seen, bucket_of(seen, event)) then
      return seen.problem
    end
  end
  if packed then
    pending[key] = sound_message(packed, p.merge)
    if not pending[key] then
      return unsound(K.pending, key)
    end
  end
  local name = "v" .. key
  local held = version ~= "" and recall(K, name, now_ms)
  if held and not tonumber(string.match(held, "^[^ ]+") or "") then
    return unsound(K.memo, name)
  end
  if packed and (group ~= "" or pending[key][message.group] ~= "") then
    return broken(K, p, { key }) or sound(K, group, p.group_limit)
  end
end

local names = {}
for i = 4, #ARGV, 7 do
  names[#names + 1] = ARGV[i]
end
for i, packed in ipairs(redis.call("HMGET", K.pending, unpack(names))) do
  problem = problem_of(names[i], packed, ARGV[i * 7], ARGV[i * 7 + 1], ARGV[i * 7 + 2])
  if problem then
    return { "foreign", now_ms, problem }
  end
end
-- The first write is one that the server refuses when out of memory: all or nothing.
redis.call("HSETNX", K.facts, "v", "1")
local done, reply = {}, { "ok", now_ms }
local serial = tonumber(redis.call("HGET", K.facts, "accepted")) or 0
for i = 4, #ARGV, 7 do
  local key, group, version, event, due = ARGV[i], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], 0
  local receipt = admit(key, version, event, group)
  if not receipt then
    local acc = ARGV[i + 6]
    acc = p.raw and acc or cmsgpack.unpack(acc)
    serial = serial + 1
    receipt, due = put(key, when(ARGV[i + 1], now_ms), ARGV[i + 2], group, version, acc, serial)
    note(key, version, event, due, group)
    done.accepted = (done.accepted or 0) + 1
  end
  if receipt ~= "scheduled" then
    done[receipt] = (done[receipt] or 0) + 1
  end
  reply[#reply + 1] = receipt
  reply[#reply + 1] = due
end
write_all()
count(K, done)
fade(K, now_ms, #ARGV)
hint(K, before, shifted and head(K) or earliest)
return tell(K, ARGV[2], now_ms, reply)
