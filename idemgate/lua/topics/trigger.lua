--- Put triggers of one slot into a topic: each makes a pending message or merges into the one of its key.
--- A key in flight gets a new pending message, never merged into the running one.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/policy)
--- ARGV[4] id of the request in front of it, or "": where some of that are left, all of this are, so that each key keeps its order
--- ARGV[5..] three a trigger: key; what it asks for (lib/asked); accumulator
--- Returns {"ok", now ms, a number a trigger...}: 8 * (when it is due, ms from now) + 0 to 4, which stand for these, then
---         "scheduled" | "merged" | "replaced" | "dropped" | "duplicate", of which the last two have no due time; or 5: it is left for
---         another request, as are all behind it, since 128 KiB have been read of what those before it join
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/weighed"
--- @include "lib/most_bytes"
--- @include "lib/bulky"
--- @include "lib/policy"
--- @include "lib/window"
--- @include "lib/asked"
--- @include "lib/fade"
--- @include "lib/count"
--- @include "lib/head"
--- @include "lib/hint"
--- @include "lib/header"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local names, asks, ask = {}, {}, nil
for i = 5, #ARGV, 3 do
  local text, n = ARGV[i + 1], #names + 1
  if not ask or text ~= ask.text then -- one after the other they often ask for the same
    ask = asked(text, now_ms)
    ask.noted = p.leading or ask.version ~= "" or ask.event ~= ""
  end
  names[n], asks[n] = ARGV[i], ask
end
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end

-- How many of the triggers go, one at least: as many as meet `most_bytes`. What is stored of a key is read where it is first met; of a
-- message that grows by each trigger an eighth counts each time, for its text is made anew. Where nothing large was ever held
-- (lib/weighed), nor a byte counts for many (lib/bulky), they meet no more than that by their number.
local function reach()
  local grows = p.merge.op == "append" or p.merge.op == "fields"
  local large, sizes, room = bulky.is(p) or redis.call("HEXISTS", K.facts, "large") == 1, {}, most_bytes
  for n = 1, (grows or large) and #names or 0 do
    local key = names[n]
    local size = sizes[key]
    local cost = size and (grows and bulky.bytes(p, size) / 8 or 0)
    if not size then
      size = large and redis.call("HSTRLEN", K.pending, key) or 0
      cost = large and bulky.bytes(p, size) + redis.call("HSTRLEN", K.flight, key) or 0
    end
    if cost > room and n > 1 then
      return n - 1
    end
    room, sizes[key] = room - cost, size + #ARGV[3 * n + 4]
  end
  return #names
end
local prior = ARGV[4] ~= "" and told(K, ARGV[4], now_ms)
if prior and prior[1] == "foreign" then
  return prior
end
-- Those in front of these have to be done: a call that was not heard of, or has left some, goes again, and these behind it.
local waits = ARGV[4] ~= "" and (not prior or prior[#prior] == 5)
local going = waits and 0 or #names > 1 and reach() or #names
local stored = going > 0 and redis.call("HMGET", K.pending, unpack(names, 1, going)) or {}
local before, flying = head(K), redis.call("HLEN", K.flight)

-- What is needed where something is met, made there (`meet`), and the event ids that were read.
local seen, admit, note, join, problem_of, store_seen
-- What is pending of the keys named here, as it was packed by this call or read and unpacked once; what is to be written of them,
-- together at the end; and when they are scheduled, false for those that are not, as far as it is known.
local pending, words, changed, scheduled, standing = {}, {}, {}, {}, {}
local earliest, shifted, pack = math.huge, false, cmsgpack.pack
local function schedule_all()
  if #scheduled > 0 then
    redis.call("ZADD", K.due, unpack(scheduled))
    scheduled = {}
  end
end
local function write_all()
  for key, m in pairs(changed) do
    words[#words + 1] = key
    words[#words + 1] = weighed(K, pack(m))
  end
  if #words > 0 then
    redis.call("HSET", K.pending, unpack(words))
  end
  schedule_all()
  if seen then
    store_seen()
  end
end

-- What is needed where a trigger meets something: a message of its key, or what is remembered. Made then: making a function costs about as
-- much as asking for a key, and most triggers that come alone meet nothing.
local function meet()
--- @include "lib/fold"
--- @include "lib/place"
--- @include "lib/unplace"
--- @include "lib/advance"
--- @include "lib/vacate"
--- @include "lib/remember"
--- @include "lib/recall"
--- @include "lib/events"
--- @include "lib/sound"

  -- Says whether this trigger counts. What is remembered says its group, too: it decides to which slot it would have to go.
  function admit(key, version, event, group)
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

  function note(key, version, event, due, group)
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

  -- Groups and lines are changed in the store: what was to be scheduled goes there first, and what is known of it may be so no more.
  local function unsettle()
    schedule_all()
    shifted, standing = true, {}
  end
  local function stands_at(key)
    if standing[key] == nil then
      schedule_all()
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
        shifted, standing[key] = true, m[message.due]
        scheduled[#scheduled + 1] = m[message.due]
        scheduled[#scheduled + 1] = key
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

  -- One trigger into the pending message of its key. Returns its receipt. (Most are alike: what they have in common is made once.)
  local new = { 1, now_ms, now_ms, 0, 0, "", 0, "", "", "", "", "", 0, 0 }
  local ungrouped = { [message.group] = "" }
  function join(key, old, ask, acc, serial)
    -- Where and when it stands: scheduled; false behind a delivery of its key or its group, or when it is ready.
    local stands = stands_at(key)
    local stood = ungrouped
    if not stands or old[message.group] .. ask.group ~= "" then
      stood = {
        [message.due] = old[message.due], [message.priority] = old[message.priority], [message.group] = old[message.group],
        [message.rank] = old[message.rank],
      }
    end
    new[message.version], new[message.acc], new[message.priority] = ask.version, acc, ask.priority
    new[message.group], new[message.serial] = ask.group, serial
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

  -- What is wrong with what one trigger will meet, or nil: its pending message, its groups, the version and the events that are remembered.
  function problem_of(key, packed, ask)
    if ask.event ~= "" then
      seen = seen or events(K)
      if not readable(seen, bucket_of(seen, ask.event)) then
        return seen.problem
      end
    end
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

  function store_seen()
    store_events(seen)
  end
end

-- What is common to new messages whose triggers ask for the same is packed once: the places of lib/message around the accumulator, which
-- only lacks a header that says how long it is.
local born = "\158" .. pack(1, now_ms, now_ms)
local function begun(ask)
  local due, why, pinned = ask.at, "time", 1
  if not due then
    due, why = window(p, { 1, now_ms, now_ms, now_ms, 0, "now" }, true, now_ms)
    pinned = 0
  end
  ask.due, ask.score = due, string.format("%.0f", due)
  ask.before = born .. pack(due, 0, why, pinned, ask.version)
  ask.behind = ask.priority .. ask.group == "" and "\160\160\160" or pack("", ask.priority, ask.group)
  return ask.before
end
-- A new message is scheduled, unless its key is in flight.
local function begin(key, ask, acc, serial)
  local before, n = ask.before or begun(ask), #words
  local m = before .. (p.raw and header.of(#acc) or "") .. acc .. ask.behind .. pack(serial) .. "\0"
  pending[key], words[n + 1], words[n + 2] = m, key, #m > 1024 and weighed(K, m) or m
  if flying == 0 or redis.call("HEXISTS", K.flight, key) == 0 then
    n = #scheduled
    scheduled[n + 1], scheduled[n + 2] = ask.score, key
    if ask.due < earliest then
      earliest = ask.due
    end
  end
  return "scheduled", ask.due
end

local met = {}
for n = 1, going do
  if stored[n] or asks[n].noted then
    if not join then
      meet()
    end
    problem = problem_of(names[n], stored[n], asks[n])
    if problem then
      return { "foreign", now_ms, problem }
    end
    met[#met + 1] = stored[n] and names[n] or nil
  end
end
if #met > 0 then
  for n, score in ipairs(redis.call("ZMSCORE", K.due, unpack(met))) do
    standing[met[n]] = tonumber(score) or false
  end
end
-- The first write is one that the server refuses when out of memory: all or nothing.
redis.call("HSETNX", K.facts, "v", "1")
local codes = { scheduled = 0, merged = 1, replaced = 2, dropped = 3, duplicate = 4 }
local done, reply = {}, { "ok", now_ms }
local before_all = tonumber(redis.call("HGET", K.facts, "accepted")) or 0
local serial = before_all
for i = 5, 4 + 3 * going, 3 do
  local key, ask, acc = ARGV[i], asks[(i - 2) / 3], ARGV[i + 2]
  local receipt, due = ask.noted and admit(key, ask.version, ask.event, ask.group), now_ms
  if not receipt then
    local old = pending[key]
    serial = serial + 1
    if old then
      if not join then
        meet() -- a message of this call
      end
      old = type(old) == "table" and old or cmsgpack.unpack(old)
      receipt, due = join(key, old, ask, p.raw and acc or cmsgpack.unpack(acc), serial)
    else
      receipt, due = begin(key, ask, acc, serial)
    end
    if ask.noted then
      note(key, ask.version, ask.event, due, ask.group)
    end
  end
  done[receipt] = (done[receipt] or 0) + 1
  reply[#reply + 1] = 8 * (due - now_ms) + codes[receipt]
end
for _ = going + 1, #names do
  reply[#reply + 1] = 5
end
done.scheduled, done.accepted = nil, serial - before_all
write_all()
count(K, done)
fade(K, now_ms, #ARGV)
hint(K, before, shifted and head(K) or earliest < math.huge and earliest)
return tell(K, ARGV[2], now_ms, reply)
