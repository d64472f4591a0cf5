--- @include "lib/slot/message"
--- @include "lib/validate/stored"
--- @include "lib/slot/delivery"
--- @include "lib/schedule/requeue"
--- @include "lib/group/group"
--- @include "lib/dead/dead_letters"
--- @include "lib/dead/discard_dead_letters"
--- @include "lib/slot/counters"
--- @include "lib/validate/lean"
--- @include "lib/slot/budget"
-- Keep only the failed items in a message. `packed` is {failure, number of failed items, their accumulator}. An
-- appended item is one trigger, so the triggers of the other items are done. The triggers behind union items or
-- fields are unknown, so all of them stay counted. Return the failure, the number of items, and the number of
-- triggers done.
local function apply_partial(p, m, packed)
  local failure, items, acc = unpack(cmsgpack.unpack(packed))
  local triggers = p.merge.op == "append" and items or m[message.count]
  local done = m[message.count] - triggers
  m[message.acc], m[message.count], m[message.splits] = acc, triggers, m[message.splits] + 1
  return failure, items, done
end

-- Settle deliveries. `endings` holds two values per delivery: key, fence. `others` maps the index of each delivery that
-- is not a plain ack to {verb, delay in ms, failure}. Messages waiting behind the deliveries are scheduled.
-- Deliveries beyond `max_call_bytes` return "left" and need another call. Return one word per delivery. On a problem,
-- return nil and the problem; nothing was written.
local function settle_deliveries(K, p, endings, others, now_ms)
  local done, acked, acked_triggers = {}, {}, 0
  local function add_count(name, n)
    done[name] = (done[name] or 0) + n
  end

  local function bury_delivery(key, d, m, failure)
    add_count("buried", 1)
    add_count("buried_triggers", m[message.count])
    add_dead_letter(K, key, d[delivery.message], failure, d[delivery.fence], now_ms)
    finish_delivery(K, p, key, m)
    return "dead"
  end

  local function settle_one(verb, key, d, delay, failure)
    local m = cmsgpack.unpack(d[delivery.message])
    redis.call("ZREM", K.leases, key)
    redis.call("HDEL", K.inflight, key)
    if verb == "part" then
      local items, triggers
      failure, items, triggers = apply_partial(p, m, failure)
      add_count("partial", 1)
      add_count("items_failed", items)
      acked_triggers = acked_triggers + triggers
      d[delivery.message] = cmsgpack.pack(m)
    end
    if verb == "bury" then
      return bury_delivery(key, d, m, failure)
    elseif d[delivery.cancelled] == 1 then
      add_count("cancelled", 1)
      add_count("cancelled_triggers", m[message.count])
      finish_delivery(K, p, key, m)
      return "cancelled"
    elseif verb == "return" then
      add_count("returned", 1)
      m[message.attempts] = m[message.attempts] - 1
      add_count("folded", requeue(K, p, key, m, m[message.due], m[message.why]))
      return "ok"
    end
    if verb == "defer" then
      add_count("deferred", 1)
      m[message.attempts], m[message.pinned] = m[message.attempts] - 1, 0
      add_count("folded", requeue(K, p, key, m, now_ms + delay, "retry"))
      return "ok"
    end
    add_count("nacked", 1)
    if m[message.attempts] >= p.attempts then
      return bury_delivery(key, d, m, failure)
    end
    m[message.failure], m[message.pinned] = failure, 0
    add_count("folded", requeue(K, p, key, m, now_ms + delay, "retry"))
    return "ok"
  end

  -- The delivery in flight of each key, or false once it was settled here: a delivery is settled at most once per
  -- call.
  local keys, live, behind = {}, {}, {}
  for i = 1, #endings, 2 do
    keys[(i + 1) / 2] = endings[i]
  end
  local delivery_in, accepted = next(others) and validate_delivery or validate_lean_delivery, count_within_budget(K, p, keys, max_call_bytes, "pending", next(others) and "inflight")
  for i, packed in ipairs(accepted > 0 and redis.call("HMGET", K.inflight, unpack(keys, 1, accepted)) or {}) do
    local key, d = keys[i], packed and delivery_in(packed)
    if packed then
      local problem = not d and corrupt_entry(K.inflight, key) or d[delivery.group] ~= "" and validate_group(K, d[delivery.group], p.group_limit)
        or others[i] and validate_keys(K, p, { key })
      if problem then
        return nil, problem
      end
      live[key] = d
    end
  end
  for i, packed in ipairs(accepted > 0 and redis.call("HMGET", K.pending, unpack(keys, 1, accepted)) or {}) do
    if packed then
      local m = validate_lean_message(packed)
      if not m then
        return nil, corrupt_entry(K.pending, keys[i])
      end
      behind[keys[i]] = m[message.due]
    end
  end

  -- Probe HSTRLEN now, which discarding dead letters and a following take need: an ACL denial must abort the script
  -- before its first write.
  redis.call("HSTRLEN", K.meta, "")
  -- Start with HDEL: a server without memory refuses a script whose first write is any that may allocate.
  redis.call("HDEL", K.meta, "")
  local reply, grouped = {}, {}
  for i, key in ipairs(keys) do
    local d, other = live[key], others[i]
    if i > accepted then
      reply[i] = "left"
    elseif not d or d[delivery.fence] ~= endings[2 * i] then
      reply[i] = "lost"
      add_count("lost", 1)
    else
      live[key] = false
      if other then
        reply[i] = settle_one(other[1], key, d, other[2], other[3])
      else
        reply[i] = "ok"
        acked[#acked + 1] = key
        acked_triggers = acked_triggers + d[delivery.count]
        if d[delivery.group] ~= "" then
          grouped[#grouped + 1] = { d[delivery.group], key }
        end
      end
    end
  end
  -- Remove acked deliveries in one batch at the end: most settled deliveries are acks.
  if #acked > 0 then
    redis.call("ZREM", K.leases, unpack(acked))
    redis.call("HDEL", K.inflight, unpack(acked))
    for _, key in ipairs(next(behind) and acked or {}) do
      if behind[key] then
        redis.call("ZADD", K.scheduled, behind[key], key)
      end
    end
    for _, one in ipairs(grouped) do
      group_leave(K, one[1], one[2], p.group_limit)
    end
    add_count("acked", #acked)
  end
  add_count("acked_triggers", acked_triggers)
  if done.buried then
    discard_dead_letters(K, p, now_ms)
  end
  add_counters(K, done)
  return reply
end
