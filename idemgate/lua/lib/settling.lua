--- @include "lib/sound"
--- @include "lib/delivery"
--- @include "lib/restore"
--- @include "lib/finish"
--- @include "lib/vacate"
--- @include "lib/message"
--- @include "lib/bury"
--- @include "lib/discard"
--- @include "lib/part"
--- @include "lib/count"
--- @include "lib/lean"
--- @include "lib/portion"
-- Ends deliveries: `given` is two a delivery: key, fence; `others` says of those that are not just done, by their place: {verb, delay
-- in ms, failure}. What waited behind each is scheduled. Those for which no room is left in `most_bytes` are "left": to be ended by another
-- call. Returns one a delivery; or nil and what is wrong, and then nothing was written.
local function settling(K, p, given, others, now_ms)
  local done, acked, acked_triggers = {}, {}, 0
  local function add(name, n)
    done[name] = (done[name] or 0) + n
  end

  local function dead(key, d, m, failure)
    add("buried", 1)
    add("buried_triggers", m[message.count])
    bury(K, key, d[delivery.message], failure, d[delivery.fence], now_ms)
    finish(K, p, key, m)
    return "dead"
  end

  local function settle(verb, key, d, delay, failure)
    local m = cmsgpack.unpack(d[delivery.message])
    redis.call("ZREM", K.lease, key)
    redis.call("HDEL", K.flight, key)
    if verb == "part" then
      local items, triggers
      failure, items, triggers = part(p, m, failure)
      add("partial", 1)
      add("items_failed", items)
      acked_triggers = acked_triggers + triggers
      d[delivery.message] = cmsgpack.pack(m)
    end
    if verb == "bury" then
      return dead(key, d, m, failure)
    elseif d[delivery.cancelled] == 1 then
      add("cancelled", 1)
      add("cancelled_triggers", m[message.count])
      finish(K, p, key, m)
      return "cancelled"
    elseif verb == "return" then
      add("returned", 1)
      m[message.attempts] = m[message.attempts] - 1
      add("folded", restore(K, p, key, m, m[message.due], m[message.why]))
      return "ok"
    end
    if verb == "defer" then
      add("deferred", 1)
      m[message.attempts], m[message.pinned] = m[message.attempts] - 1, 0
      add("folded", restore(K, p, key, m, now_ms + delay, "retry"))
      return "ok"
    end
    add("nacked", 1)
    if m[message.attempts] >= p.attempts then
      return dead(key, d, m, failure)
    end
    m[message.failure], m[message.pinned] = failure, 0
    add("folded", restore(K, p, key, m, now_ms + delay, "retry"))
    return "ok"
  end

  -- Of each key what is in flight, and once it has ended here, false: a delivery ends once, whatever else is said of it.
  local keys, live, behind = {}, {}, {}
  for i = 1, #given, 2 do
    keys[(i + 1) / 2] = given[i]
  end
  local delivery_in, going = next(others) and sound_delivery or lean_delivery, portion(K, p, keys, most_bytes, "pending", next(others) and "flight")
  for i, packed in ipairs(going > 0 and redis.call("HMGET", K.flight, unpack(keys, 1, going)) or {}) do
    local key, d = keys[i], packed and delivery_in(packed)
    if packed then
      local problem = not d and unsound(K.flight, key) or d[delivery.group] ~= "" and sound(K, d[delivery.group], p.group_limit)
        or others[i] and broken(K, p, { key })
      if problem then
        return nil, problem
      end
      live[key] = d
    end
  end
  for i, packed in ipairs(going > 0 and redis.call("HMGET", K.pending, unpack(keys, 1, going)) or {}) do
    if packed then
      local m = lean_message(packed)
      if not m then
        return nil, unsound(K.pending, keys[i])
      end
      behind[keys[i]] = m[message.due]
    end
  end

  -- What is asked later, of old letters and by a take behind this: whoever may not ask it is refused while all is whole.
  redis.call("HSTRLEN", K.facts, "")
  -- A write that frees memory comes first: a server that has none left refuses a script that begins with any other.
  redis.call("HDEL", K.facts, "")
  local reply, grouped = {}, {}
  for i, key in ipairs(keys) do
    local d, other = live[key], others[i]
    if i > going then
      reply[i] = "left"
    elseif not d or d[delivery.fence] ~= given[2 * i] then
      reply[i] = "lost"
      add("lost", 1)
    else
      live[key] = false
      if other then
        reply[i] = settle(other[1], key, d, other[2], other[3])
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
  -- What is done ends together, after everything else: that is most of what comes here.
  if #acked > 0 then
    redis.call("ZREM", K.lease, unpack(acked))
    redis.call("HDEL", K.flight, unpack(acked))
    for _, key in ipairs(next(behind) and acked or {}) do
      if behind[key] then
        redis.call("ZADD", K.due, behind[key], key)
      end
    end
    for _, one in ipairs(grouped) do
      vacate(K, one[1], one[2], p.group_limit)
    end
    add("acked", #acked)
  end
  add("acked_triggers", acked_triggers)
  if done.buried then
    discard(K, p, now_ms)
  end
  count(K, done)
  return reply
end
