--- Accept triggers of one slot. Each creates a pending message, or merges into the pending one of its key. A trigger of a
--- key in flight creates the next message of that key, or merges into it. The message in flight never changes.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/slot/slot)
--- ARGV[4] id of the preceding request, or "": if that one deferred any trigger, this one defers all, to keep per-key order
--- ARGV[5..] three a trigger: key; options (lib/trigger/accept_any); accumulator
--- Returns {"ok", now ms, then, if the topic stores results, the serial of the last trigger before this call; a number a
---         trigger...}: 8 * (due time, ms from now) + 0 to 4, which stand for these, then
---         "scheduled" | "merged" | "replaced" | "dropped" | "duplicate", of which the last two have no due time; "scheduled" is a
---         new message, which waits for the end of the delivery if its key is in flight; or 5: deferred
---         to another request, as are all behind it, because this call has read 128 KiB of messages to merge with
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot/slot"
--- @include "lib/validate/run_steps"
--- @include "lib/replies/replies"
--- @include "lib/trigger/accept_plain"
--- @include "lib/trigger/accept_any"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)

-- Parse the arguments: keys, options and accumulators of the triggers. Options that are those of the trigger before are left
-- out: most calls have the same for all.
local function parse_triggers()
  local ARGV, names, texts, accs, n, former = ARGV, {}, {}, {}, 0, nil -- a local name is found faster
  for i = 5, #ARGV, 3 do
    local text = ARGV[i + 1]
    n = n + 1
    names[n], accs[n] = ARGV[i], ARGV[i + 2]
    if text ~= former then
      texts[n], former = text, text
    end
  end
  return names, texts, accs
end

-- Return how many triggers this call accepts: those that fit into `max_call_bytes`, at least one. Return nil and
-- the reply if the preceding request failed.
local function count_fitting(names, accs)
  local prior = ARGV[4] ~= "" and recall_reply(K, ARGV[4], now_ms)
  if prior and prior[1] == "foreign" then
    return nil, prior
  elseif ARGV[4] ~= "" and (not prior or prior[#prior] == 5) then
    return 0 -- keep per-key order: the preceding request is unknown or incomplete, so the client resends both
  elseif #names == 1 then
    return 1
  end
  -- The stored data of a key counts when its key first appears. A message that grows with each trigger counts an eighth each
  -- time because it is packed again. If the slot never held a large entry (track_large) and values are not merged one by one,
  -- the number of triggers bounds the bytes.
  --- @include "lib/slot/budget"
  local grows = p.merge.op == "append" or p.merge.op == "fields"
  local large, known, room = budget.by_value(p) or K.large, {}, max_call_bytes
  for n = 1, (grows or large) and #names or 0 do
    local key = names[n]
    local size = known[key]
    local cost = size and (grows and budget.cost(p, size) / 8 or 0)
    if not size then
      size = large and redis.call("HSTRLEN", K.messages, key) + redis.call("HSTRLEN", K.next, key) or 0
      cost = large and budget.cost(p, size) or 0
    end
    if cost > room and n > 1 then
      return n - 1
    end
    room, known[key] = room - cost, size + #accs[n]
  end
  return #names
end

-- Accept the triggers and return the reply. Delete expired facts with triggers that store some, and with every 64th other.
local function accept_triggers(t)
  local sweeps = t.last_serial % 64 + #t.names >= 64
  if sweeps then -- the keys that are written last are read before the first write: they may have another type
    redis.call("HLEN", K.dedup)
    redis.call("ZCARD", K.dedup_expiry)
  end
  local reply, short = accept_plain(t)
  local tracked = false
  if not reply then
    reply, tracked = accept_any(t)
  end
  if reply[1] == "ok" and (sweeps or tracked) then
    -- No single call pays for all.
    local old = redis.call("ZRANGEBYSCORE", K.dedup_expiry, "-inf", now_ms, "LIMIT", 0, #ARGV)
    if #old > 0 then
      redis.call("ZREM", K.dedup_expiry, unpack(old))
      redis.call("HDEL", K.dedup, unpack(old))
    end
  end
  return reply, short
end

local function steps()
  local meta = redis.call("HMGET", K.meta, "v", "accepted", "merged", "flushed", "large")
  local problem = check_layout(K, meta[1])
  if problem then
    return { "foreign", now_ms, problem }
  end
  local known_reply = recall_reply(K, ARGV[2], now_ms)
  if known_reply then
    return known_reply
  end
  K.large = meta[5] ~= false
  local names, texts, accs = parse_triggers()
  local fitting, failed = count_fitting(names, accs)
  if not fitting then
    return failed
  end
  local given, reply, short = #names, { "ok", now_ms }, nil
  if fitting < given then
    names = { unpack(names, 1, fitting) }
  end
  if fitting > 0 then
    reply, short = accept_triggers({
      K = K, p = p, now_ms = now_ms, names = names, texts = texts, accs = accs,
      last_serial = tonumber(meta[2]) or 0, merged = tonumber(meta[3]) or 0, flushed = tonumber(meta[4]) or 0,
    })
  end
  if reply[1] == "foreign" then
    return reply
  end
  for n = fitting + 1, given do
    reply[2 + n] = 5
  end
  if p.results then
    table.insert(reply, 3, tonumber(meta[2]) or 0) -- results of later serials cover these triggers
    short = nil
  end
  return remember_reply(K, ARGV[2], now_ms, reply, fitting == given and given > 1 and short or nil)
end
return run_steps(K, now_ms, steps)
