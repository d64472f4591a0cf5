--- Put triggers of one slot into a topic: each makes a pending message or merges into the one of its key.
--- A key in flight gets a new pending message, never merged into the running one.
--- KEYS[1..11] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy, packed map: window, quiet, max_delay, remember in ms; max_size; leading; merge; raw = accumulators are not packed
--- ARGV[4..] five a trigger: key; when ("", "a" + ms since the epoch, "d" + ms from now); version or ""; event id or ""; accumulator
--- Returns {"ok", now ms, then two a trigger: "scheduled" | "merged" | "replaced" | "dropped" | "duplicate", due ms (0 = none)}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/fold"
--- @include "lib/window"
--- @include "lib/when"
--- @include "lib/remember"
--- @include "lib/recall"
--- @include "lib/fade"
--- @include "lib/count"
--- @include "lib/head"
--- @include "lib/hint"
local K, p = slot(KEYS), cmsgpack.unpack(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end

-- Says whether this trigger counts, and leaves a note for the next one.
local function admit(key, version, event)
  if event ~= "" and recall(K, "e" .. event .. key, now_ms) then
    return "duplicate"
  end
  if version ~= "" then
    local held = recall(K, "v" .. key, now_ms)
    if held and tonumber(version) < tonumber(held) then
      return "dropped"
    end
  end
  if p.leading and recall(K, "k" .. key, now_ms) then
    if p.quiet then
      remember(K, "k" .. key, "", now_ms + p.quiet)
    end
    return "dropped"
  end
end

local function note(key, version, event)
  if event ~= "" then
    remember(K, "e" .. event .. key, "", now_ms + p.remember)
  end
  if version ~= "" then
    remember(K, "v" .. key, version, now_ms + p.remember)
  end
  if p.leading then
    remember(K, "k" .. key, "", now_ms + (p.window or p.quiet))
  end
end

-- One trigger into the pending message of its key. Returns its receipt.
local function put(key, asked, version, acc)
  local packed = redis.call("HGET", K.pending, key)
  -- When it stands scheduled; nil or false behind a delivery of its key, and for a new message.
  local stands = packed and tonumber(redis.call("ZSCORE", K.due, key))
  local m = { 1, now_ms, now_ms, 0, 0, "", 0, version, acc, "" }
  local receipt = "scheduled"
  if packed then
    m = fold(p.merge, cmsgpack.unpack(packed), m)
    receipt = "merged"
    if stands and stands ~= m[message.due] then
      m[message.due], m[message.why] = stands, "flush"
    end
  end
  if asked then
    m[message.due], m[message.why], m[message.pinned] = asked, "time", 1
    receipt = packed and "replaced" or receipt
  elseif m[message.pinned] == 0 and m[message.attempts] == 0 then
    -- A time that a caller named stands, and so does a retry's: neither is moved by the policy.
    m[message.due], m[message.why] = window(p, m, not packed, now_ms)
  end
  redis.call("HSET", K.pending, key, cmsgpack.pack(m))
  if m[message.due] ~= stands and (stands or not packed and redis.call("HEXISTS", K.flight, key) == 0) then
    redis.call("ZADD", K.due, m[message.due], key)
  end
  return receipt, m[message.due]
end

local before, soonest, done, reply = head(K), nil, {}, { "ok", now_ms }
for i = 4, #ARGV, 5 do
  local key, version, event, due = ARGV[i], ARGV[i + 2], ARGV[i + 3], 0
  local receipt = admit(key, version, event)
  if not receipt then
    local acc = ARGV[i + 4]
    receipt, due = put(key, when(ARGV[i + 1], now_ms), version, p.raw and acc or cmsgpack.unpack(acc))
    note(key, version, event)
    done.accepted = (done.accepted or 0) + 1
    soonest = math.min(soonest or due, due)
  end
  if receipt ~= "scheduled" then
    done[receipt] = (done[receipt] or 0) + 1
  end
  reply[#reply + 1] = receipt
  reply[#reply + 1] = due
end
redis.call("HSETNX", K.facts, "v", "1")
count(K, done)
fade(K, now_ms, #ARGV)
hint(K, before, soonest)
return tell(K, ARGV[2], now_ms, reply)
