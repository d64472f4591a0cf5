--- Makes a part of the reply.
--- @include "topics/lib/slot/header"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/schedule/due_times"
--- @include "topics/lib/payloads"
--- @include "topics/lib/validate/stored"
-- Return the state of a call that merges by headers. `places` holds where the message of each key stands in the words to
-- write. `sums` holds the unpacked accumulators of messages that are only a header there. `before` is the stored counter.
local function new_merging(t, serial)
  local K = t.K
  local counters = redis.call("HMGET", K.meta, "merged", "flushed")
  return {
    serial = serial, flushed = tonumber(counters[2]) or 0, before = count_of(counters[1]), merged = 0, places = {}, sums = {},
  }
end

-- Merge a trigger into a packed message. Return the message, and its new and its former due time. Return nil if the
-- message needs `accept_any`. Such a message is corrupt, is full, or has an extension. Or it waits for a retry. Or its time was
-- set by the caller or by a flush of the slot (`flushed`: its last serial). If the policy computes, the message is
-- only a header, and `merging.sums` has its unpacked accumulator.
local function merge_packed(t, merging, key, packed, acc)
  if #packed < HEADER_SIZE then
    return nil
  end
  local p, now_ms = t.p, t.now_ms
  local flags, why, count, first, last, old_due, serial = struct.unpack(HEADER, packed)
  if flags ~= 0 or why == reason.retry or why > reason.redrive or serial <= merging.flushed then
    return nil
  end
  local due = old_due
  count, first, last = count + 1, first < now_ms and first or now_ms, last > now_ms and last or now_ms
  if p.quiet or p.max_size then
    due, why = due_by_policy(p, due, why, first, count, now_ms)
  end
  local header = struct.pack(HEADER, 0, why, count, first, last, due, merging.serial)
  if p.merge.op == "last" then
    return header .. acc, due, old_due
  elseif p.merge.op == "first" then
    return header .. string.sub(packed, HEADER_SIZE + 1), due, old_due
  end
  local stored = merging.sums[key] or unpack_table(string.sub(packed, HEADER_SIZE + 1))
  if not stored or not merging.sums[key] and not is_accumulator(p.merge, stored) then
    return nil
  end
  local merged, lost = merge(p.merge, stored, cmsgpack.unpack(acc))
  if lost and lost > 0 then
    return nil -- the trigger may be dropped
  end
  merging.sums[key] = merged
  return header, due, old_due
end
