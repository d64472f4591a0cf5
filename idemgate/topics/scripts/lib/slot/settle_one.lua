--- Makes a part of the reply.
--- @include "topics/lib/schedule/requeue"
--- @include "topics/lib/dead_letters"
--- @include "topics/lib/slot/store_result"
-- Keep only the failed items in a message. `packed` is {failure, number of failed items, their accumulator}. An
-- appended item is one trigger, so the triggers of the other items are done. The triggers behind union items or
-- fields are unknown, so all of them stay counted. Return the failure, the number of items, and the number of
-- triggers done.
local function apply_partial(p, m, packed)
  local failure, items, acc = unpack(cmsgpack.unpack(packed))
  local triggers = p.merge.op == "append" and items or m.count
  local done = m.count - triggers
  m.acc, m.count, m.splits = acc, triggers, m.splits + 1
  return failure, items, done
end

-- Settle a delivery in another way than a plain ack, and count it with `add_count`. Return its outcome. For the verb "result",
-- an ack of which the result is stored, `failure` is the result.
local function settle_one(K, p, key, d, verb, delay, failure, now_ms, add_count)
  local m = delivered_message(K, key, d)
  end_delivery(K, key)
  if verb == "part" then
    local items, triggers
    failure, items, triggers = apply_partial(p, m, failure)
    add_count("partial", 1)
    add_count("items_failed", items)
    add_count("acked_triggers", triggers)
  end
  if verb == "result" then
    store_result(K, p, key, m, failure, now_ms)
    add_count("acked", 1)
    add_count("acked_triggers", m.count)
    finish_delivery(K, p, key, m.group)
    return "ok"
  elseif d.cancelled and verb ~= "bury" then -- fault: settle-cancelled
    store_result(K, p, key, m, "c", now_ms)
    add_count("cancelled", 1)
    add_count("cancelled_triggers", m.count)
    finish_delivery(K, p, key, m.group, true)
    return "cancelled"
  elseif verb == "return" then -- fault: given-back
    add_count("returned", 1)
    add_count("folded", requeue(K, p, key, m, m.due, m.why))
    return "ok"
  elseif verb == "defer" then
    add_count("deferred", 1)
    m.pinned = 0 -- fault: put-off
    add_count("folded", requeue(K, p, key, m, now_ms + delay, reason.retry))
    return "ok"
  end
  m.attempts = m.attempts + 1 -- fault: attempt-counted
  add_count("nacked", verb == "bury" and 0 or 1)
  if verb == "bury" or is_exhausted(p, m) then -- fault: buried
    add_count("buried", 1)
    add_count("buried_triggers", m.count)
    add_dead_letter(K, key, m, failure, tonumber(d.token), now_ms)
    store_result(K, p, key, m, "d" .. failure, now_ms)
    finish_delivery(K, p, key, m.group, true)
    return "dead"
  end
  m.failure, m.pinned = failure, 0
  lower_priority(p, m)
  add_count("folded", requeue(K, p, key, m, now_ms + delay, reason.retry))
  return "ok"
end
