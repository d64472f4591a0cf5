--- @include "lib/slot/message"
--- @include "lib/trigger/read_stored"
--- @include "lib/slot/counters"
-- The state of a call that accepts triggers with options. By key it holds:
--   pending    the decoded message
--   in_flight  true while a delivery of the key is in flight
--   scores     the scheduled time; false if the key is not scheduled, nil if unknown
--   changed    true if the message has to be written
-- `scheduled` collects due times and keys.
local function new_call(K, p, now_ms)
  return { K = K, p = p, now_ms = now_ms, pending = {}, scores = {}, changed = {}, scheduled = {} }
end

-- Read the packed pending messages of these keys and their scheduled times.
local function read_pending(call, names)
  local existing, stored = {}, nil
  stored, call.in_flight = read_stored(call.K, names)
  for i, key in ipairs(names) do
    call.pending[key] = stored[i] or nil
    if stored[i] and not call.in_flight[key] then
      existing[#existing + 1] = key
    end
  end
  for i, score in ipairs(#existing > 0 and redis.call("ZMSCORE", call.K.scheduled, unpack(existing)) or {}) do
    call.scores[existing[i]] = tonumber(score) or false
  end
end

local function add_scheduled(call, key, due)
  local scheduled = call.scheduled
  scheduled[#scheduled + 1], scheduled[#scheduled + 2] = due, key
  call.scores[key] = due
end
local function write_scheduled(call)
  if #call.scheduled > 0 then
    redis.call("ZADD", call.K.scheduled, unpack(call.scheduled))
    call.scheduled = {}
  end
end

local function write_pending(call)
  local words, behind = {}, {}
  for key in pairs(call.changed) do
    local target = call.in_flight[key] and behind or words
    target[#target + 1], target[#target + 2] = key, track_large(call.K, encode_message(call.pending[key]))
  end
  if #words > 0 then
    redis.call("HSET", call.K.messages, unpack(words))
  end
  if #behind > 0 then
    redis.call("HSET", call.K.next, unpack(behind))
  end
  write_scheduled(call)
end
