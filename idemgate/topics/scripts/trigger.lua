--- Accept triggers of one slot. Each creates a pending message, or merges into the pending one of its key. A trigger of
--- a key in flight creates the next message of that key, or merges into it. The message in flight never changes.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (topics/lib/slot/slot)
--- ARGV[4] id of the preceding request, or "": if that one deferred any trigger, this one defers all: per-key order
--- ARGV[5] options of all triggers. One for all: a time (parse_time) or "", or packed options (topics/lib/trigger/accept_any).
---         One for each: a packed array of times, or of options in the longer format of arrays.
--- ARGV[6] "1" if no key occurs twice, else ""
--- ARGV[7..] two a trigger: key; accumulator. All keys come first
--- Returns {"ok", now ms, serial, answer, number, answer, number...}. A topic without results has no serial: that of the
---         last trigger before this call. Triggers in turn with the same answer share it: `number` counts them.
---         An answer is 8 * (due time, ms from now) + a code. The codes 0 to 4 stand for these, then
---         "scheduled" | "merged" | "replaced" | "dropped" | "duplicate". The last two have no due time. "scheduled" is a
---         new message. It waits for the end of the delivery if its key is in flight. Code 5: this call has read 128 KiB
---         of messages, so this trigger and all behind it are deferred to another request. The codes 6 and 7 are 1 and 2
---         with items that had no room.
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/trigger/accept_one"
local K, p, now_ms = slot(KEYS), policy(ARGV[3]), math.floor(now(ARGV[1]) / 1000)
local given = (#ARGV - 6) / 2
local DETAILED, TIMES, DETAILED_LIST = 0x96, 0xdc, 0xdd -- first bytes: of options, of arrays of times and options
local stored
local special = p.leading or p.history -- each trigger needs `accept_any`
if given == 1 and ARGV[4] == "" and #ARGV[2] == 16 and not special then -- a longer id is that of a request which moved
  -- Through `accept_plain` a trigger alone takes 29 % more instructions. An error comes from a read or from one of the first
  -- two writes, so no message was stored: the steps below find the reason.
  local done, reply, message = pcall(accept_one, K, p, now_ms, ARGV)
  if done and reply then
    return reply
  end
  stored = done and message and { message }
end

--- @include "lib/problems"
--- @include "topics/lib/validate/run_steps"
--- @include "topics/lib/replies"
--- @include "topics/lib/trigger/accept_plain"
-- Return how many triggers this call accepts: those that fit into `max_call_bytes`, at least one. Return nil and
-- the reply if the preceding request failed.
local function count_fitting()
  local prior = ARGV[4] ~= "" and recall_reply(K, ARGV[4], now_ms)
  if prior and prior[1] == "foreign" then
    return nil, prior
  elseif ARGV[4] ~= "" and (not prior or prior[#prior - 1] == 5) then
    return 0 -- keep per-key order: the preceding request is unknown or incomplete, so the client resends both
  elseif given == 1 then
    return 1
  end
  -- The stored data of a key counts when its key first appears. A message that grows with each trigger counts an
  -- eighth each time because it is packed again. If the slot never held a large entry (track_large) and values are
  -- not merged one by one, the number of triggers bounds the bytes.
  local op = p.merge.op
  local grows, by_value = op == "append" or op == "fields", op == "union" or op == "fields"
  local large = by_value or redis.call("HEXISTS", K.meta, "large") == 1
  if not grows and not large then
    return given
  end
  --- @include "topics/lib/slot/budget"
  local known, room = {}, max_call_bytes
  for n = 1, given do
    local key = ARGV[6 + n]
    local size = known[key]
    local cost = size and (grows and budget.cost(p, size) / 8 or 0)
    if not size then
      size = large and redis.call("HSTRLEN", K.messages, key) + redis.call("HSTRLEN", K.next, key) or 0
      cost = large and budget.cost(p, size) or 0
    end
    if cost > room and n > 1 then
      return n - 1
    end
    room, known[key] = room - cost, size + #ARGV[6 + given + n]
  end
  return given
end

-- Accept the triggers and return the reply: by the headers of messages alone, or else with any options and messages. With
-- `accept_any` alone, 128 new messages take 1.8 times the instructions, and 128 merges 2.8 times.
local function accept_triggers(t)
  local kind = string.byte(t.options)
  t.times = kind == TIMES and cmsgpack.unpack(t.options)
  local reply = kind ~= DETAILED and kind ~= DETAILED_LIST and not special and accept_plain(t)
  if reply then
    return reply
  end
  --- @include "topics/lib/trigger/accept_any"
  return accept_any(t)
end

-- Delete expired facts. No single call pays for all.
local function delete_expired()
  local old = redis.call("ZRANGEBYSCORE", K.dedup_expiry, "-inf", now_ms, "LIMIT", 0, #ARGV)
  if #old > 0 then
    redis.call("ZREM", K.dedup_expiry, unpack(old))
    redis.call("HDEL", K.dedup, unpack(old))
  end
end

local function steps()
  local meta = redis.call("HMGET", K.meta, "v", "accepted")
  local last_serial = tonumber(meta[2]) or 0
  local problem = check_layout(K, meta[1]) or corrupt_number(K.meta, "accepted", last_serial)
  if problem then
    return { "foreign", now_ms, problem }
  end
  local known_reply = recall_reply(K, ARGV[2], now_ms)
  if known_reply then -- fault: trigger-copy
    return known_reply
  end
  local fitting, failed = count_fitting()
  if not fitting then
    return failed
  end
  local reply, tracked = { "ok", now_ms }, false
  local sweeps = last_serial % 64 + fitting >= 64 -- with triggers that store facts, and with every 64th other
  if fitting > 0 then
    if sweeps then -- the keys that are written last are read before the first write: they may have another type
      redis.call("HLEN", K.dedup)
      redis.call("ZCARD", K.dedup_expiry)
    end
    reply, tracked = accept_triggers({
      K = K, p = p, now_ms = now_ms, n = fitting, given = given, args = ARGV, options = ARGV[5],
      distinct = ARGV[6] == "1", last_serial = last_serial, stored = stored,
    })
  end
  if reply[1] == "foreign" then
    return reply
  elseif fitting > 0 and (sweeps or tracked) then
    delete_expired()
  end
  if fitting < given then
    reply[#reply + 1], reply[#reply + 2] = 5, given - fitting
  end
  if p.results then
    table.insert(reply, 3, last_serial) -- results of later serials cover these triggers
  end
  return remember_reply(K, ARGV[2], now_ms, reply)
end
return run_steps(K, now_ms, steps)
