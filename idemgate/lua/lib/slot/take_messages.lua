--- @include "lib/slot/message"
--- @include "lib/fence"
--- @include "lib/digits"
--- @include "lib/validate/stored"
--- @include "lib/replies/replies"
--- @include "lib/slot/delivery"
--- @include "lib/schedule/requeue"
--- @include "lib/group/group"
--- @include "lib/schedule/set_members"
--- @include "lib/schedule/rank"
--- @include "lib/dead/dead_letters"
--- @include "lib/dead/discard_dead_letters"
--- @include "lib/slot/counters"
--- @include "lib/schedule/next_due"
--- @include "lib/slot/budget"
--- @include "lib/slot/string_header"
-- Count an attempt of a message and pack it. `packed` is its former packed text, if nothing else changed. Then
-- replacing one byte costs half of packing again. A large message is packed again: a patched copy would create two
-- strings.
local function pack_attempt(m, packed)
  local before = m[message.attempts]
  m[message.attempts] = before + 1
  local at = packed and #packed < 1024 and cmsgpack.unpack_limit(packed, message.attempts - 1, 1)
  if at and before < 127 and string.byte(packed, at + 1) == before then
    return string.sub(packed, 1, at) .. string.char(before + 1) .. string.sub(packed, at + 2)
  end
  return cmsgpack.pack(m)
end

-- Take due messages of a slot, once per request. Requeue lapsed deliveries first, then deliver at most `want.most`
-- messages with `want.lease` ms. Limits: `flights` deliveries in flight (0 = unlimited), and one delivery per
-- `interval` us (0 = unlimited) with a `burst`. All messages together fit `max_call_bytes`, or there is only one. A
-- call that requeues lapsed deliveries, at most 32, also delivers at most 32. Return {"ok", now ms, next due ms (0 =
-- none), lapsed, then four a delivery: key, fence, due ms, message}. On a problem, return nil and the problem;
-- nothing was written.
local function take_messages(K, p, now_us, request, want)
  local now_ms, problem = math.floor(now_us / 1000), nil
  -- The id of the client's original request, whose parts went to several slots (recall_reply).
  local origin = string.sub(request, -16)
  local known_reply = recall_reply(K, request, now_ms)
  if known_reply then
    if known_reply[1] == "foreign" then
      return nil, known_reply[3]
    end
    -- Return the deliveries of that request that it still owns.
    local reply = { "ok", now_ms, next_due(K, now_ms, 0), known_reply[2] }
    for _, key in ipairs(known_reply[1]) do
      local d = redis.call("HGET", K.inflight, key)
      d = d and validate_delivery(d)
      if d and d[delivery.request] == origin then
        reply[#reply + 1] = key
        reply[#reply + 1] = d[delivery.fence]
        reply[#reply + 1] = d[delivery.due]
        reply[#reply + 1] = d[delivery.message]
      end
    end
    return reply
  end

  local done = { taken = 0, lapsed = 0 }
  local function add_count(name, n)
    done[name] = (done[name] or 0) + n
  end

  local lapse_reason = "lease lapsed: its worker vanished or stalled"
  -- Retry at once after the first lapse. After the second, retry at a pseudo-random moment within one lease.
  -- Otherwise a poison message that kills its worker lapses together with the same neighbours, until all of them are
  -- dead.
  local function retry_time(key, d, m)
    if m[message.attempts] < 2 then
      return now_ms
    end
    local drawn = string.sub(redis.sha1hex(key .. digits(d[delivery.fence])), 1, 8)
    return now_ms + tonumber(drawn, 16) % want.lease
  end

  -- Requeue or bury a delivery whose lease lapsed.
  local function reclaim_lapsed(key)
    local d = cmsgpack.unpack(redis.call("HGET", K.inflight, key))
    local m = cmsgpack.unpack(d[delivery.message])
    redis.call("ZREM", K.leases, key)
    redis.call("HDEL", K.inflight, key)
    done.lapsed = done.lapsed + 1
    if d[delivery.cancelled] == 1 then
      add_count("cancelled", 1)
      add_count("cancelled_triggers", m[message.count])
      finish_delivery(K, p, key, m)
    elseif m[message.attempts] >= p.attempts then
      add_count("buried", 1)
      add_count("buried_triggers", m[message.count])
      add_dead_letter(K, key, d[delivery.message], lapse_reason, d[delivery.fence], now_ms)
      finish_delivery(K, p, key, m)
    else
      m[message.failure], m[message.pinned] = lapse_reason, 0
      add_count("folded", requeue(K, p, key, m, retry_time(key, d, m), "retry"))
    end
  end

  local meta = redis.call("HMGET", K.meta, "fence", "lease")
  local last, keys, lease_end = meta[1], {}, digits(now_ms + want.lease)
  local lapsed_keys = redis.call("ZRANGEBYSCORE", K.leases, "-inf", now_ms, "LIMIT", 0, 32)
  local accepted, bytes = count_within_budget(K, p, lapsed_keys, max_call_bytes, "inflight", "pending")
  -- Tokens follow the clock, so a token ahead of the clock shows that the clock jumped back. Then leases and the rate
  -- limit restart from now. Tokens of one batch run ahead of the clock by microseconds.
  if (tonumber(last) or 0) > now_us + 1000000 then
    for _, key in ipairs(redis.call("ZRANGEBYSCORE", K.leases, "(" .. lease_end, "+inf", "LIMIT", 0, 1000)) do
      redis.call("ZREM", K.leases, key)
      redis.call("ZADD", K.leases, lease_end, key)
    end
    local most, used_up = now_us + want.interval * want.burst, tonumber(redis.call("HGET", K.meta, "rate"))
    if used_up and used_up > most then
      redis.call("HSET", K.meta, "rate", digits(most))
    end
  end

  -- A corrupt entry stops the loop: it and the entries behind it stay untouched. The problem is reported only if
  -- nothing was done before it.
  for i = 1, accepted do
    local key = lapsed_keys[i]
    problem = redis.call("HEXISTS", K.inflight, key) == 0 and missing_entry(K.leases, key) or validate_keys(K, p, { key })
    if problem then
      break
    end
    reclaim_lapsed(key)
  end

  -- Return how many messages may be delivered, and when the slot opens again: 0 = open now, a time in ms, or nil =
  -- when a delivery ends.
  local function count_permitted(wanted)
    if redis.call("HEXISTS", K.meta, "paused") == 1 then
      return 0, nil
    end
    local most, interval = want.flights, want.interval
    if most > 0 then
      local room = most - redis.call("HLEN", K.inflight)
      if room <= 0 then
        return 0, nil
      end
      wanted = math.min(wanted, room)
    end
    if interval > 0 then
      -- Generic cell rate algorithm (GCRA): the theoretical arrival time may run ahead of the clock by at most the
      -- burst.
      local ahead = math.max(tonumber(redis.call("HGET", K.meta, "rate")) or 0, now_us)
      local burst = want.burst * interval
      local room = math.max(0, math.floor((now_us + burst - ahead) / interval))
      if room < wanted then
        return room, math.ceil((ahead + interval * (room + 1) - burst) / 1000)
      end
    end
    return wanted, 0
  end

  local reply, at = { "ok", now_ms, 0, done.lapsed }, 4
  local flights, leases, waits = {}, {}, {}
  local pack, packed_origin = cmsgpack.pack, cmsgpack.pack(origin, 0)

  -- Set the rank by which a message waits for its group.
  local function set_waiting_rank(m)
    m[message.rank] = nil
    if p.ranked then
      -- Most ranks are negative. The offset and 16 digits sort correctly up to the highest priority.
      m[message.rank] = string.format("%016.0f", rank_of(p, m) + 4503599627370496)
    end
  end

  -- Deliver one due message, or let it wait for its group. Writes are batched in `write_batch`.
  local function deliver(key, due, m, packed)
    local group = m[message.group]
    if due ~= m[message.due] then
      m[message.due], m[message.why], packed = due, "flush", nil
    end
    if group ~= "" and not group_enter(K, group, key, p.group_limit) then
      set_waiting_rank(m)
      redis.call("ZADD", K.group_waiting, 0, waiting_member(key, m))
      waits[#waits + 1] = key
      waits[#waits + 1] = cmsgpack.pack(m)
      return
    end
    last = fence(last, now_us)
    packed = pack_attempt(m, packed)
    flights[#flights + 1] = key
    -- The array of seven of lib/slot/delivery.
    flights[#flights + 1] = "\151" .. pack(last) .. packed_origin .. pack(due, m[message.count], group) .. string_header.of(#packed) .. packed
    leases[#leases + 1] = lease_end
    leases[#leases + 1] = key
    keys[#keys + 1] = key
    reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = key, last, due, packed
    at = at + 4
  end

  -- Write the batch that `deliver` collected. The first write, whichever it is, is refused when the server is out of
  -- memory.
  local function write_batch(from, members)
    if #flights > 0 then
      redis.call("HSET", K.inflight, unpack(flights))
      redis.call("ZADD", K.leases, unpack(leases))
      redis.call("HDEL", K.pending, unpack(keys, #keys - #leases / 2 + 1))
    end
    if #waits > 0 then
      redis.call("HSET", K.pending, unpack(waits))
    end
    redis.call("ZREM", K[from], unpack(members))
    flights, leases, waits = {}, {}, {}
  end

  local wanted, opens = count_permitted(done.lapsed > 0 and math.min(want.most, 32) or want.most)
  -- A topic redefined without priorities still delivers its ranked messages first.
  local ranked = p.ranked or redis.call("EXISTS", K.ready) == 1
  local unranked = wanted > 0 and ranked and not problem and rank_due(K, p, now_ms) or nil
  local from = ranked and "ready" or "scheduled"
  -- Return the next due messages: their keys, their due times, and their members in that set.
  local function next_due_messages(most)
    local found, dues = {}, {}
    if ranked then
      local members = redis.call("ZRANGE", K.ready, 0, most - 1)
      for i, member in ipairs(members) do
        found[i], dues[i] = string.sub(member, 16), tonumber(string.sub(member, 1, 15))
      end
      return found, dues, members
    end
    local scored = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
    for i = 1, #scored, 2 do
      found[#found + 1], dues[#dues + 1] = scored[i], tonumber(scored[i + 1])
    end
    return found, dues, found
  end
  -- Every pass delivers or moves what it reads, so blocked messages are read once; at most 1,000 per call.
  local walked = 0
  while not problem and #keys < wanted and walked < 1000 and bytes > 0 do
    local found, dues, members = next_due_messages(wanted - #keys)
    if #found == 0 then
      problem = unranked
      break
    end
    accepted, bytes = count_within_budget(K, p, found, bytes, "pending")
    if accepted == 0 then
      break
    end
    local packed, messages = redis.call("HMGET", K.pending, unpack(found, 1, accepted)), {}
    for i = 1, accepted do
      local key = found[i]
      local m = dues[i] and packed[i] and validate_message(packed[i])
      problem = not packed[i] and missing_entry(K[from], members[i]) or not m and corrupt_entry(K.pending, key)
        or m[message.group] ~= "" and validate_group(K, m[message.group]) or nil
      if problem then
        break
      end
      messages[i] = m
    end
    -- Deliver the messages before a corrupt one. The next pass starts with that one and reports it.
    for i, m in ipairs(messages) do
      deliver(found[i], dues[i], m, packed[i])
    end
    if #messages == 0 then
      break
    end
    write_batch(from, { unpack(members, 1, #messages) })
    walked = walked + #messages
  end
  if problem and walked == 0 and done.lapsed == 0 then
    return nil, problem
  end
  if #keys < wanted then
    -- Fewer were due than permitted: the next message may go as soon as it is due.
    opens = 0
  end
  done.taken = #keys
  if #keys > 0 then
    redis.call("HSET", K.meta, "fence", digits(last))
    if want.lease > (tonumber(meta[2]) or 0) then
      redis.call("HSET", K.meta, "lease", digits(want.lease))
    end
    if want.interval > 0 then
      local ahead = math.max(tonumber(redis.call("HGET", K.meta, "rate")) or 0, now_us)
      redis.call("HSET", K.meta, "rate", digits(ahead + #keys * want.interval))
    end
  end
  if done.buried then
    discard_dead_letters(K, p, now_ms)
  end
  add_counters(K, done)
  if #keys > 0 or done.lapsed > 0 then
    remember_reply(K, request, now_ms, { keys, done.lapsed })
  end
  reply[3] = next_due(K, now_ms, opens)
  return reply
end
