--- @include "lib/slot/message"
--- @include "lib/slot/counters"
--- @include "lib/slot/add_entries"
-- The state of a call that merges triggers. By key it holds:
--   pending    the message: packed or decoded. A packed one is only a header if `accs` has its unpacked accumulator.
--   in_flight  true while a delivery of the key is in flight
--   scores     the scheduled time; false if the key is not scheduled. While `headers_current`, nil means the due time of the
--              header.
--   changed    true if the message has to be written
-- `scheduled` collects due times and keys. `words` collects keys and new messages. Their sizes are counted because the
-- length operator searches a table.
local function new_call(K, p, now_ms)
  return {
    K = K, p = p, now_ms = now_ms, pending = {}, accs = {}, in_flight = {}, scores = {}, changed = {}, scheduled = {},
    words = {}, words_size = 0, scheduled_size = 0, earliest = math.huge, headers_current = true, existing = 0,
  }
end

-- Read the messages behind deliveries in flight into `stored`, by index.
local function read_behind(call, names, stored)
  local behind, at = {}, {}
  for i, entry in ipairs(redis.call("HMGET", call.K.inflight, unpack(names))) do
    if entry then
      call.in_flight[names[i]], stored[i] = true, false
      behind[#behind + 1], at[#at + 1] = names[i], i
    end
  end
  for n, packed in ipairs(#behind > 0 and redis.call("HMGET", call.K.next, unpack(behind)) or {}) do
    stored[at[n]] = packed
  end
end

-- Read the pending messages of these keys. Read the scheduled time only if the header may say another. That is so after a
-- flush of the slot (`flushed` is the last serial). It is also so with an extension or in a topic with priorities.
local function read_pending(call, names, flushed)
  local K, pending, unsure = call.K, call.pending, {}
  local stored = redis.call("HMGET", K.messages, unpack(names))
  if redis.call("HLEN", K.inflight) > 0 then
    read_behind(call, names, stored)
  end
  for i = 1, #names do
    local packed, key = stored[i], names[i]
    if packed then
      pending[key] = packed
      if call.existing == 0 then
        call.ranked = call.p.ranked or redis.call("EXISTS", K.ready) == 1
      end
      call.existing = call.existing + 1
      if not call.in_flight[key] and is_message(packed)
        and (call.ranked or string.byte(packed) > 1 or flushed > 0 and struct.unpack(">I6", packed, 26) <= flushed) then
        unsure[#unsure + 1] = key
      end
    end
  end
  for i, score in ipairs(#unsure > 0 and redis.call("ZMSCORE", K.scheduled, unpack(unsure)) or {}) do
    call.scores[unsure[i]] = tonumber(score) or false
  end
end

local function write_scheduled(call)
  add_entries(call.K.messages, {}, 0, call.K.scheduled, call.scheduled, call.scheduled_size)
  call.scheduled_size = 0
end

local function write_pending(call)
  local words, behind, n = call.words, {}, call.words_size
  for key in pairs(call.changed) do
    local m, acc = call.pending[key], call.accs[key]
    m = type(m) == "table" and encode_message(m) or acc and m .. cmsgpack.pack(acc) or m
    track_large(call.K, m)
    if call.in_flight[key] then
      behind[#behind + 1] = key
      behind[#behind + 1] = m
    else
      words[n + 1], words[n + 2] = key, m
      n = n + 2
    end
  end
  add_entries(call.K.messages, words, n, call.K.scheduled, call.scheduled, call.scheduled_size)
  call.scheduled_size = 0
  if #behind > 0 then
    redis.call("HSET", call.K.next, unpack(behind))
  end
end
