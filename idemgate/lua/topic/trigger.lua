--- Put triggers of one slot into a topic: each makes a pending message or merges into the one of its key.
--- A key in flight gets a new pending message, never merged into the running one.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4..] three a trigger: key; what it asks for (lib/asked); accumulator
--- Returns {"ok", now ms, receipts}: packed, a number a trigger, 8 * (due, ms from now) + 0 to 4, which stand for these, then
---         "scheduled" | "merged" | "replaced" | "dropped" | "duplicate", the last two without a due time
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
--- @include "lib/asked"
--- @include "lib/remember"
--- @include "lib/recall"
--- @include "lib/fade"
--- @include "lib/count"
--- @include "lib/head"
--- @include "lib/hint"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local names, accs, asks, ask = {}, {}, {}, asked("", now_ms)
for i = 4, #ARGV, 3 do
  local n = #names + 1
  -- One after the other they often ask for the same.
  ask = ARGV[i + 1] == ask.text and ask or asked(ARGV[i + 1], now_ms)
  names[n], accs[n], asks[n] = ARGV[i], ARGV[i + 2], ask
end
-- What has to be read of these says as well whether they are of our types.
local facts, stored = redis.pcall("HMGET", K.facts, "v", "accepted"), redis.pcall("HMGET", K.pending, unpack(names))
local flying, before = redis.pcall("HLEN", K.flight), redis.pcall("ZRANGE", K.due, 0, 0, "WITHSCORES")
local problem = facts.err and other_than(K.facts, "hash") or stored.err and other_than(K.pending, "hash")
  or type(flying) == "table" and other_than(K.flight, "hash") or before.err and other_than(K.due, "zset")
  or wrong_zset(K.lease) or wrong_seldom(K) or wrong_layout(K, facts[1])
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end

-- Says whether this trigger counts. What is remembered says its group, too: it decides to which slot it would have to go.
local function admit(key, version, event, group)
  if event ~= "" and recall(K, "e" .. event .. key, now_ms) then
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
    remember(K, "e" .. event .. key, group, math.max(now_ms, due) + p.remember)
  end
  if version ~= "" then
    remember(K, "v" .. key, group == "" and version or version .. " " .. group, now_ms + p.remember)
  end
  if p.leading then
    remember(K, "k" .. key, group, now_ms + (p.window or p.quiet))
  end
end

-- What is pending of the keys named here, as it was packed by this call or read and unpacked once; what is to be written of them,
-- together at the end; and when they are scheduled, false for those that are not, as far as it is known.
local pending, changed, scheduled, standing = {}, {}, {}, {}
local earliest, shifted = nil, false
local function schedule(key, due)
  scheduled[#scheduled + 1] = due
  scheduled[#scheduled + 1] = key
  standing[key] = due
end
local function schedule_all()
  if #scheduled > 0 then
    redis.call("ZADD", K.due, unpack(scheduled))
    scheduled = {}
  end
end
local function write_all()
  local words = {}
  for key, m in pairs(changed) do
    words[#words + 1] = key
    words[#words + 1] = type(m) == "table" and cmsgpack.pack(m) or m
  end
  if #words > 0 then
    redis.call("HSET", K.pending, unpack(words))
  end
  schedule_all()
end

-- Groups and lines are changed in the store: what was to be scheduled goes there first, and what is known of it may be so no more.
local function unsettle()
  schedule_all()
  shifted, standing = true, {}
end
local function stands_at(key)
  if standing[key] == nil then
    standing[key] = tonumber(redis.call("ZSCORE", K.due, key)) or false
  end
  return standing[key]
end

-- A pending message was changed: it goes where it now belongs. One that held its group between two attempts, and was given another
-- time by its caller, holds it no longer. `old` are the places that say where it stood.
local function shift(key, old, stands, m, at)
  local other = old[message.priority] ~= m[message.priority]
  local elsewhere = old[message.group] ~= m[message.group]
  if stands then
    if m[message.due] ~= stands then
      shifted = true
      schedule(key, m[message.due])
    end
  elseif old[message.due] ~= m[message.due] or other or elsewhere then
    unsettle()
    if unplace(K, key, old) then
      place(K, key, m)
    end
  end
  local later = at or m[message.due] > (stands or old[message.due]) or elsewhere
  if old[message.group] == "" or not (later or other) or redis.call("HEXISTS", K.flight, key) == 1 then
    return
  end
  unsettle()
  if later then
    vacate(K, old[message.group], key, p.group_limit)
  else
    -- It may have been the first of its group to go, and be so no more.
    advance(K, m[message.group], p.group_limit)
  end
end

-- One trigger into the pending message of its key. Returns its receipt.
local function join(key, old, ask, acc, serial)
  -- Where and when it stands: scheduled; false behind a delivery of its key or its group, or when it is ready.
  local stands = stands_at(key)
  local stood = {
    [message.due] = old[message.due], [message.priority] = old[message.priority], [message.group] = old[message.group],
    [message.rank] = old[message.rank],
  }
  local new = { 1, now_ms, now_ms, 0, 0, "", 0, ask.version, acc, "", ask.priority, ask.group, serial, 0 }
  local receipt = "merged"
  local m = fold(p.merge, old, new)
  if stands and stands ~= m[message.due] then
    m[message.due], m[message.why] = stands, "flush"
  end
  if ask.at then
    receipt = "replaced"
    m[message.due], m[message.why], m[message.pinned] = ask.at, "time", 1
  elseif m[message.pinned] == 0 and m[message.attempts] == 0 and m[message.why] ~= "retry" then
    -- A time that a caller named stands, and so does a retry's: neither is moved by the policy.
    m[message.due], m[message.why] = window(p, m, false, now_ms)
  end
  pending[key], changed[key] = m, m
  shift(key, stood, stands, m, ask.at)
  return receipt, m[message.due]
end

-- When the first trigger of a message makes it due; what such messages have in common is packed once.
local fresh_due, fresh_why = window(p, { 1, now_ms, now_ms, 0, 0, "" }, true, now_ms)
local function begun(ask)
  local due, why, pinned = ask.at or fresh_due, ask.at and "time" or fresh_why, ask.at and 1 or 0
  ask.due = due
  ask.begun = "\158" .. cmsgpack.pack(1, now_ms, now_ms, due, 0, why, pinned, ask.version)
  return ask.begun
end
-- A new message is scheduled, unless its key is in flight. (The places of lib/message, packed without a table of them.)
local function begin(key, ask, acc, serial)
  local places = ask.begun or begun(ask)
  local m = places .. (p.raw and cmsgpack.pack(acc) or acc) .. cmsgpack.pack("", ask.priority, ask.group, serial, 0)
  pending[key], changed[key] = m, m
  if flying == 0 or redis.call("HEXISTS", K.flight, key) == 0 then
    schedule(key, ask.due)
    earliest = math.min(earliest or ask.due, ask.due)
  else
    standing[key] = false
  end
  return "scheduled", ask.due
end

-- What is wrong with what one trigger will meet, or nil: its pending message, its groups, the version that is remembered.
local function problem_of(key, packed, ask)
  if packed and not pending[key] then
    pending[key] = sound_message(packed, p.merge)
    if not pending[key] then
      return unsound(K.pending, key)
    end
  end
  if ask.version ~= "" then
    local name = "v" .. key
    local held = recall(K, name, now_ms)
    if held and not tonumber(string.match(held, "^[^ ]+") or "") then
      return unsound(K.memo, name)
    end
  end
  if packed and (ask.group ~= "" or pending[key][message.group] ~= "") then
    return broken(K, p, { key }) or sound(K, ask.group, p.group_limit)
  end
end

local met = {}
for n, key in ipairs(names) do
  problem = problem_of(key, stored[n], asks[n])
  if problem then
    return { "foreign", now_ms, problem }
  end
  met[#met + 1] = stored[n] and key or nil
end
if #met > 0 then
  for n, score in ipairs(redis.call("ZMSCORE", K.due, unpack(met))) do
    standing[met[n]] = tonumber(score) or false
  end
end
-- The first write is one that the server refuses when out of memory: all or nothing.
redis.call("HSETNX", K.facts, "v", "1")
local codes = { scheduled = 0, merged = 1, replaced = 2, dropped = 3, duplicate = 4 }
local done, receipts = { accepted = 0 }, {}
local serial = tonumber(facts[2]) or 0
for n, key in ipairs(names) do
  local ask = asks[n]
  local receipt, due = admit(key, ask.version, ask.event, ask.group), now_ms
  if not receipt then
    local acc, old = accs[n], pending[key]
    serial = serial + 1
    if not old then
      receipt, due = begin(key, ask, acc, serial)
    else
      old = type(old) == "table" and old or cmsgpack.unpack(old)
      receipt, due = join(key, old, ask, p.raw and acc or cmsgpack.unpack(acc), serial)
    end
    note(key, ask.version, ask.event, due, ask.group)
    done.accepted = done.accepted + 1
  end
  if receipt ~= "scheduled" then
    done[receipt] = (done[receipt] or 0) + 1
  end
  receipts[n] = 8 * (due - now_ms) + codes[receipt]
end
write_all()
count(K, done)
fade(K, now_ms, #ARGV)
hint(K, tonumber(before[2]), shifted and head(K) or earliest)
return tell(K, ARGV[2], now_ms, { "ok", now_ms, cmsgpack.pack(receipts) })
