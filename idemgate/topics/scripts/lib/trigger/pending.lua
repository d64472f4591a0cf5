--- @include "topics/lib/slot/message"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/trigger/read_stored"
-- The state of a call that accepts triggers with options. By key it holds:
--   pending    the message: packed, and decoded once a trigger merges into it
--   in_flight  true while a delivery of the key is in flight
--   scores     the scheduled time; false if the key is not scheduled, nil if unknown
--   changed    true if the message has to be written
-- `noted` holds what the history gets of triggers: what happened, the key, and perhaps the message and the event.
-- `done` counts what is added to the slot's counters, and `lost` the items for which merged messages had no room.
-- `scheduled` collects due times and keys. `new` is the trigger that is merged, as a message. One table serves all
-- triggers.
local function new_call(t)
  return {
    K = t.K, p = t.p, now_ms = t.now_ms, pending = {}, scores = {}, changed = {}, scheduled = {}, done = {}, noted = {}, lost = 0,
    new = { count = 1, first = t.now_ms, last = t.now_ms, serial = t.last_serial + 1 },
  }
end

-- Read the packed pending messages of these keys and their scheduled times.
local function read_pending(call, t, names)
  local existing = {}
  read_stored(t)
  call.in_flight = t.in_flight
  for i, key in ipairs(names) do
    if t.stored[i] then
      call.pending[key] = t.stored[i]
      existing[#existing + 1] = not call.in_flight[key] and key or nil
    end
  end
  for i, score in ipairs(#existing > 0 and redis.call("ZMSCORE", call.K.scheduled, unpack(existing)) or {}) do
    call.scores[existing[i]] = tonumber(score) or false
  end
end

local function add_scheduled(call, key, due, score)
  local scheduled = call.scheduled
  scheduled[#scheduled + 1], scheduled[#scheduled + 2] = score, key
  call.scores[key] = due
end
local function write_scheduled(call)
  if #call.scheduled > 0 then
    redis.call("ZADD", call.K.scheduled, unpack(call.scheduled))
    call.scheduled = {}
  end
end

local function write_pending(call)
  local entries, nexts = {}, {}
  for key in pairs(call.changed) do
    local target = call.in_flight[key] and nexts or entries
    local m = call.pending[key]
    target[#target + 1], target[#target + 2] = key, track_large(call.K, type(m) == "table" and encode_message(m) or m)
  end
  if #entries > 0 then
    redis.call("HSET", call.K.messages, unpack(entries))
  end
  if #nexts > 0 then
    redis.call("HSET", call.K.next, unpack(nexts))
  end
  write_scheduled(call)
end

-- Write the scheduled times collected so far: group changes happen in the store. The cached times are dropped.
local function flush_scheduled(call)
  write_scheduled(call)
  call.scores = {}
end
local function scheduled_at(call, key)
  if call.in_flight[key] then
    return false
  elseif call.scores[key] == nil then
    write_scheduled(call)
    call.scores[key] = tonumber(redis.call("ZSCORE", call.K.scheduled, key)) or false
  end
  return call.scores[key]
end
