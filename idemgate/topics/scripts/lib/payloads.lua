--- @include "lib/now"
-- Merge two accumulators of one policy, `a` being the older. Merging is associative, so triggers and requeued
-- deliveries share it. The exception is the dropped count of a union, which counts an item once per rejected trigger.
--   last, first   the packed payload
--   count, sum    {number, 1 if it is a float}; from 2^53 on an integer becomes a float
--   min, max      {number, packed payload}
--   append        {items, dropped, the items' packed payloads, each wrapped as a msgpack string, concatenated}
--   union         {dropped, {packed payload, ...}}
--   fields        {[field] = accumulator of its own policy, ["\255"] = dropped, if any (no field name has that byte)}
-- `merge` returns the accumulator, the number of items of `b` for which there was no room, and whether `b` has none else.
local merge
local function merge_append(spec, a, b)
  local room, size = spec.cap - a[1], spec.bytes - #a[3]
  if a[2] > 0 then
    room = 0 -- once full, closed: the list is the beginning of all payloads, without holes
  end
  if b[1] <= room and #b[3] <= size then
    return { a[1] + b[1], b[2], a[3] .. b[3] }, 0, false
  end
  local kept, from = 0, 0
  while kept < b[1] and kept < room do
    local after = cmsgpack.unpack_one(b[3], from)
    if after == -1 then
      after = #b[3]
    end
    if after > size then
      break
    end
    kept, from = kept + 1, after
  end
  local lost = b[1] - kept
  return { a[1] + kept, a[2] + b[2] + lost, a[3] .. string.sub(b[3], 1, from) }, lost, kept == 0
end
-- The items and byte size of every union that this call has added to.
local looked_through = {}
local function merge_union(spec, a, b)
  local known, dropped, lost = looked_through[a[2]] or { {}, 0, 0 }, a[1], 0
  local seen, size = known[1], known[2]
  for i = known[3] + 1, #a[2] do
    seen[a[2][i]] = true
    size = size + #a[2][i]
  end
  for _, item in ipairs(b[2]) do
    if not seen[item] then
      if dropped == 0 and #a[2] < spec.cap and size + #item <= spec.bytes then
        a[2][#a[2] + 1] = item
        seen[item] = true
        size = size + #item
      else
        dropped, lost = dropped + 1, lost + 1
      end
    end
  end
  looked_through[a[2]] = { seen, size, #a[2] }
  return { dropped + b[1], a[2] }, lost, lost > 0 and lost == #b[2]
end
local function merge_sum(a, b)
  local total, float = a[1] + b[1], math.max(a[2], b[2])
  if math.abs(total) >= 9007199254740992 then
    float = 1
  end
  return { total, float }
end
-- Unnamed fields are limited to 1000, `MAX_FIELDS` in topics/merge.py: each one costs every later trigger.
local function merge_fields(spec, a, b)
  local room, dropped, lost, full = 1000, (a["\255"] or 0) + (b["\255"] or 0), 0, next(b) ~= nil
  a["\255"], b["\255"] = nil, nil
  for field in pairs(a) do
    room = spec.fields[field] and room or room - 1
  end
  for field, acc in pairs(b) do
    local left, none = 0, false
    if a[field] ~= nil then
      a[field], left, none = merge(spec.fields[field] or spec.rest, a[field], acc)
    elseif spec.fields[field] then
      a[field] = acc
    elseif room > 0 and dropped == 0 then
      a[field], room = acc, room - 1
    else
      dropped, left, none = dropped + 1, 1, true
    end
    lost, full = lost + (left or 0), full and none
  end
  a["\255"] = dropped > 0 and dropped or nil
  return a, lost, full and lost > 0
end
function merge(spec, a, b)
  local op = spec.op
  if op == "last" then
    return b
  elseif op == "first" then
    return a
  elseif op == "sum" or op == "count" then
    return merge_sum(a, b)
  elseif op == "min" then
    return b[1] < a[1] and b or a
  elseif op == "max" then
    return b[1] > a[1] and b or a
  elseif op == "append" then
    return merge_append(spec, a, b)
  elseif op == "union" then
    return merge_union(spec, a, b)
  elseif op == "fields" then
    return merge_fields(spec, a, b)
  end
  error("no merge policy " .. tostring(op))
end

-- Merge the accumulators of two messages, as `merge` does. Those of `first` and `last` stay packed; others are unpacked once.
local function merge_accumulators(spec, a, b)
  if spec.op == "last" then
    return b
  elseif spec.op == "first" then
    return a
  end
  a = type(a) == "table" and a or cmsgpack.unpack(a)
  return merge(spec, a, type(b) == "table" and b or cmsgpack.unpack(b))
end

-- Start the attempts of a message that failed anew: a trigger joins it. With "last" nothing of what failed is left. Else the
-- earlier attempts still count (is_exhausted).
local function restart_attempts(spec, m)
  if spec.op == "last" then
    m.failure, m.earlier = "", ""
  else
    m.earlier = digits((tonumber(m.earlier) or 0) + m.attempts)
  end
  m.attempts = 0
end

-- Merge two messages of the same key, `old` being the older. Due time, attempts and reason stay those of `old`; the
-- caller decides. Return `old` and the number of items for which there was no room. Return nil and that number if `new` is
-- a trigger of which nothing was merged: then `old` has only counted the items.
local function merge_messages(spec, old, new, is_trigger)
  local acc, lost, full = merge_accumulators(spec, old.acc, new.acc)
  old.acc = acc
  if is_trigger and full then
    return nil, lost
  end
  old.count = old.count + new.count -- fault: merged-count
  old.first = math.min(old.first, new.first)
  old.last = math.max(old.last, new.last)
  old.serial = math.max(old.serial, new.serial)
  if new.version ~= "" then
    old.version = new.version
  end
  if new.priority ~= "" then
    old.priority = new.priority
  end
  old.group = new.group -- also none: every trigger says the group that its key belongs to
  if new.traces then
    --- @include "topics/lib/join_traces"
    old.traces = join_traces(old.traces, new.traces)
  end
  return old, lost or 0
end
