--- @include "lib/fence"
--- @include "lib/digits"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/delivery"
--- @include "lib/restore"
--- @include "lib/finish"
--- @include "lib/attempted"
--- @include "lib/occupy"
--- @include "lib/lined"
--- @include "lib/score"
--- @include "lib/rank"
--- @include "lib/bury"
--- @include "lib/discard"
--- @include "lib/count"
--- @include "lib/next_due"
--- @include "lib/portion"
--- @include "lib/header"
-- Takes what is due from a slot, once for each request: first puts back what lapsed, then hands out at most `want.most` messages with a
-- `lease` (ms), as far as limits permit: at most so many `flights` at a time (0 = any number), one every `interval` us (0 = any rate), of
-- which `burst` at once. All that it goes through has at most `most_bytes`, or is one; and behind some that
-- lapsed, 32 at most, it hands out 32 at most. Returns {"ok", now ms, next due ms (0 = none), lapsed, then four a delivery: key, fence, due ms, message}; or nil
-- and what is wrong, and then nothing was written.
local function taking(K, p, now_us, request, want)
  local now_ms, problem = math.floor(now_us / 1000), nil
  -- The request that was made first, whose parts were asked of several slots (lib/told).
  local origin = string.sub(request, -16)
  local given = told(K, request, now_ms)
  if given then
    if given[1] == "foreign" then
      return nil, given[3]
    end
    -- The deliveries of that request, as far as they are still its own.
    local reply = { "ok", now_ms, next_due(K, now_ms, 0), given[2] }
    for _, key in ipairs(given[1]) do
      local d = redis.call("HGET", K.flight, key)
      d = d and sound_delivery(d)
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
  local function add(name, n)
    done[name] = (done[name] or 0) + n
  end

  local silent = "lease lapsed: its worker vanished or stalled"
  -- When to try again what fell silent: at once, but the second time at some moment of a lease, apart from what was in
  -- flight with it. Else a message that kills its workers takes the same neighbours along until all of them are dead.
  local function again(key, d, m)
    if m[message.attempts] < 2 then
      return now_ms
    end
    local drawn = string.sub(redis.sha1hex(key .. digits(d[delivery.fence])), 1, 8)
    return now_ms + tonumber(drawn, 16) % want.lease
  end

  -- A delivery whose owner fell silent: to be tried again, or dead.
  local function reclaim(key)
    local d = cmsgpack.unpack(redis.call("HGET", K.flight, key))
    local m = cmsgpack.unpack(d[delivery.message])
    redis.call("ZREM", K.lease, key)
    redis.call("HDEL", K.flight, key)
    done.lapsed = done.lapsed + 1
    if d[delivery.cancelled] == 1 then
      add("cancelled", 1)
      add("cancelled_triggers", m[message.count])
      finish(K, p, key, m)
    elseif m[message.attempts] >= p.attempts then
      add("buried", 1)
      add("buried_triggers", m[message.count])
      bury(K, key, d[delivery.message], silent, d[delivery.fence], now_ms)
      finish(K, p, key, m)
    else
      m[message.failure], m[message.pinned] = silent, 0
      add("folded", restore(K, p, key, m, again(key, d, m), "retry"))
    end
  end

  local facts = redis.call("HMGET", K.facts, "fence", "lease")
  local last, keys, lease_end = facts[1], {}, digits(now_ms + want.lease)
  local silenced = redis.call("ZRANGEBYSCORE", K.lease, "-inf", now_ms, "LIMIT", 0, 32)
  local going, bytes = portion(K, p, silenced, most_bytes, "flight", "pending")
  -- Tokens follow the clock, so that they tell of a clock set back; leases end, and the rate is used up, from
  -- now on as if it had begun now. (Fences of one batch run ahead of the clock by microseconds.)
  if (tonumber(last) or 0) > now_us + 1000000 then
    for _, key in ipairs(redis.call("ZRANGEBYSCORE", K.lease, "(" .. lease_end, "+inf", "LIMIT", 0, 1000)) do
      redis.call("ZREM", K.lease, key)
      redis.call("ZADD", K.lease, lease_end, key)
    end
    local most, used_up = now_us + want.interval * want.burst, tonumber(redis.call("HGET", K.facts, "rate"))
    if used_up and used_up > most then
      redis.call("HSET", K.facts, "rate", digits(most))
    end
  end

  -- A look at what is next finds something that is none of ours: it is not touched, nor what stands behind it, and it is said,
  -- unless something was done before, which is said first.
  for i = 1, going do
    local key = silenced[i]
    problem = redis.call("HEXISTS", K.flight, key) == 0 and vacant(K.lease, key) or broken(K, p, { key })
    if problem then
      break
    end
    reclaim(key)
  end

  -- How many may be handed out, and when the slot opens again: 0 = it is open, at a time, or (nil) when a delivery ends.
  local function permitted(wanted)
    if redis.call("HEXISTS", K.facts, "paused") == 1 then
      return 0, nil
    end
    local most, interval = want.flights, want.interval
    if most > 0 then
      local room = most - redis.call("HLEN", K.flight)
      if room <= 0 then
        return 0, nil
      end
      wanted = math.min(wanted, room)
    end
    if interval > 0 then
      -- Generic cell rate algorithm: the time up to which the rate is used up runs ahead by at most the burst.
      local ahead = math.max(tonumber(redis.call("HGET", K.facts, "rate")) or 0, now_us)
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
  local pack, ours = cmsgpack.pack, cmsgpack.pack(origin, 0)

  -- The rank with which a message stands in the line of its group.
  local function line_up(m)
    m[message.rank] = nil
    if p.ranked then
      -- Ranks are below zero for most; so many digits sort up to the highest priority there can be.
      m[message.rank] = string.format("%016.0f", score(p, m) + 4503599627370496)
    end
  end

  -- One due message: handed out, or put into the line of its group. What is written, is written for all of them together.
  local function hand_out(key, due, m, packed)
    local group = m[message.group]
    if due ~= m[message.due] then
      m[message.due], m[message.why], packed = due, "flush", nil
    end
    if group ~= "" and not occupy(K, group, key, p.group_limit) then
      line_up(m)
      redis.call("ZADD", K.line, 0, lined(key, m))
      waits[#waits + 1] = key
      waits[#waits + 1] = cmsgpack.pack(m)
      return
    end
    last = fence(last, now_us)
    packed = attempted(m, packed)
    flights[#flights + 1] = key
    -- An array of seven (lib/delivery).
    flights[#flights + 1] = "\151" .. pack(last) .. ours .. pack(due, m[message.count], group) .. header.of(#packed) .. packed
    leases[#leases + 1] = lease_end
    leases[#leases + 1] = key
    keys[#keys + 1] = key
    reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = key, last, due, packed
    at = at + 4
  end

  -- Writes what `hand_out` decided. The first write, whichever it is, is refused whole when the server is out of memory.
  local function write(from, members)
    if #flights > 0 then
      redis.call("HSET", K.flight, unpack(flights))
      redis.call("ZADD", K.lease, unpack(leases))
      redis.call("HDEL", K.pending, unpack(keys, #keys - #leases / 2 + 1))
    end
    if #waits > 0 then
      redis.call("HSET", K.pending, unpack(waits))
    end
    redis.call("ZREM", K[from], unpack(members))
    flights, leases, waits = {}, {}, {}
  end

  local wanted, opens = permitted(done.lapsed > 0 and math.min(want.most, 32) or want.most)
  -- What was ranked before its topic was redefined to have no priorities is ranked to its end.
  local ranked = p.ranked or redis.call("EXISTS", K.ready) == 1
  local unranked = wanted > 0 and ranked and not problem and rank(K, p, now_ms) or nil
  local from = ranked and "ready" or "due"
  -- The next of those that are due: their keys, when each was due, and as what they stand in that set.
  local function head(most)
    local found, dues = {}, {}
    if ranked then
      local members = redis.call("ZRANGE", K.ready, 0, most - 1)
      for i, member in ipairs(members) do
        found[i], dues[i] = string.sub(member, 16), tonumber(string.sub(member, 1, 15))
      end
      return found, dues, members
    end
    local scored = redis.call("ZRANGEBYSCORE", K.due, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
    for i = 1, #scored, 2 do
      found[#found + 1], dues[#dues + 1] = scored[i], tonumber(scored[i + 1])
    end
    return found, dues, found
  end
  -- Each look at the head hands out or moves aside what it finds, so that blocked messages are walked over once; 1,000 a call.
  local walked = 0
  while not problem and #keys < wanted and walked < 1000 and bytes > 0 do
    local found, dues, members = head(wanted - #keys)
    if #found == 0 then
      problem = unranked
      break
    end
    going, bytes = portion(K, p, found, bytes, "pending")
    if going == 0 then
      break
    end
    local packed, messages = redis.call("HMGET", K.pending, unpack(found, 1, going)), {}
    for i = 1, going do
      local key = found[i]
      local m = dues[i] and packed[i] and sound_message(packed[i])
      problem = not packed[i] and vacant(K[from], members[i]) or not m and unsound(K.pending, key)
        or m[message.group] ~= "" and sound(K, m[message.group]) or nil
      if problem then
        break
      end
      messages[i] = m
    end
    -- Those before the one that is not sound go all the same: the next look begins with it, and says so.
    for i, m in ipairs(messages) do
      hand_out(found[i], dues[i], m, packed[i])
    end
    if #messages == 0 then
      break
    end
    write(from, { unpack(members, 1, #messages) })
    walked = walked + #messages
  end
  if problem and walked == 0 and done.lapsed == 0 then
    return nil, problem
  end
  if #keys < wanted then
    -- Not all of what is permitted was there: the next may go as soon as it is due.
    opens = 0
  end
  done.taken = #keys
  if #keys > 0 then
    redis.call("HSET", K.facts, "fence", digits(last))
    if want.lease > (tonumber(facts[2]) or 0) then
      redis.call("HSET", K.facts, "lease", digits(want.lease))
    end
    if want.interval > 0 then
      local ahead = math.max(tonumber(redis.call("HGET", K.facts, "rate")) or 0, now_us)
      redis.call("HSET", K.facts, "rate", digits(ahead + #keys * want.interval))
    end
  end
  if done.buried then
    discard(K, p, now_ms)
  end
  count(K, done)
  if #keys > 0 or done.lapsed > 0 then
    tell(K, request, now_ms, { keys, done.lapsed })
  end
  reply[3] = next_due(K, now_ms, opens)
  return reply
end
