--- Makes a part of the reply.
--- Keys: from
--- @include "topics/lib/slot/header"
--- @include "topics/lib/slot/inflight"
--- @include "lib/fence"
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "lib/problems"
--- @include "topics/lib/replies"
--- @include "topics/lib/slot/reclaim_lapsed"
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/schedule/next_due"
--- @include "topics/lib/slot/budget"
--- @include "topics/lib/slot/add_entries"
-- Return how many messages may be delivered, and when the slot opens again: 0 = open now, a time in ms, or nil = when a
-- delivery ends. The rate is a generic cell rate algorithm (GCRA): the theoretical arrival time may run ahead of the
-- clock by at most the burst.
local function count_permitted(K, want, wanted, paused, rate, now_us)
  if paused then
    return 0, nil
  end
  if want.flights > 0 then
    local room = want.flights - redis.call("ZCARD", K.leases)
    if room <= 0 then
      return 0, nil
    end
    wanted = math.min(wanted, room)
  end
  if want.interval > 0 then
    local ahead, burst = math.max(rate, now_us), want.burst * want.interval
    local room = math.max(0, math.floor((now_us + burst - ahead) / want.interval))
    if room < wanted then
      return room, math.ceil((ahead + want.interval * (room + 1) - burst) / 1000)
    end
  end
  return wanted, 0
end

-- Restart leases and the rate limit from now, because the clock jumped back: tokens follow the clock, and the last one
-- is ahead of it. Tokens of one batch run ahead of the clock by microseconds.
local function restart_times(K, now_us, want, rate)
  --- @include "topics/lib/slot/read_entries"
  --- @include "topics/lib/slot/move_leases"
  local ends, most = math.floor(now_us / 1000) + want.lease, now_us + want.interval * want.burst
  local keys = redis.call("ZRANGEBYSCORE", K.leases, "(" .. lease_start(K, ends), "+inf", "LIMIT", 0, 1000)
  if #keys > 0 then
    local entries, stored = read_entries(K, keys)
    move_leases(K, keys, entries, stored, ends)
  end
  if rate > most then
    redis.call("HDEL", K.meta, "") -- a server without memory refuses a script whose first write may allocate
    redis.call("HSET", K.meta, "rate", digits(most))
  end
  return math.min(rate, most)
end

-- Return the next due messages: their keys, their due times in the ready set, and their members in the set that holds them.
local function next_due_messages(K, ranked, now_ms, most)
  local found, dues = {}, {}
  if ranked then
    --- @include "topics/lib/schedule/parse_ready"
    local members = redis.call("ZRANGE", K.ready, 0, most - 1)
    for i, member in ipairs(members) do
      dues[i], found[i] = parse_ready(member)
    end
    return found, dues, members
  end
  found = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "LIMIT", 0, most)
  return found, dues, found
end

-- Read a batch of at most `most` due messages: `keys`, `dues` and `members` as `next_due_messages` returns them. The first `n`
-- of them fit into `bytes`; `messages` holds these, and `bytes` what remains. `full`: there may be more.
local function read_due_batch(K, p, ranked, now_ms, most, bytes)
  local batch = {}
  batch.keys, batch.dues, batch.members = next_due_messages(K, ranked, now_ms, most)
  batch.n, batch.bytes = count_within_budget(K, p, batch.keys, bytes, "messages")
  if batch.n > 0 then
    batch.full = batch.n == most or batch.n < #batch.keys
    batch.messages = redis.call("HMGET", K.messages, unpack(batch.keys, 1, batch.n))
  end
  return batch
end

-- Write the deliveries of a batch, and remove what it moved from the set `from`. `entries` has `n` values, `leases` `size`.
local function write_batch(K, from, batch, entries, n, leases, size, moved)
  add_entries(K.inflight, entries, n, K.leases, leases, size)
  if batch.waiting and #batch.waiting > 0 then
    redis.call("HSET", K.messages, unpack(batch.waiting))
    redis.call("ZADD", K.group_waiting, unpack(batch.waiting_members))
  end
  if #moved > 0 then
    redis.call("ZREM", from, unpack(moved))
  end
end

-- Record what a take delivers: its token, the longest lease, the number of messages, the term, the time of the rate limit.
local function record_take(K, want, token_text, taken, meta, rate, now_us)
  local longest, delivered = tonumber(meta[3]) or 0, count_of(meta[7])
  local words = { "fence", token_text, "lease", digits(math.max(want.lease, longest)), "taken", digits(delivered + taken), "term", digits(K.term) }
  if want.interval > 0 then
    words[9], words[10] = "rate", digits(math.max(rate, now_us) + taken * want.interval)
  end
  redis.call("HSET", K.meta, unpack(words))
end

-- Return the deliveries of an earlier take that it still owns.
local function replay_take(K, known, now_ms)
  --- @include "topics/lib/slot/read_entries"
  local token, reply = digits(known[3]), { "ok", now_ms, next_due(K, now_ms, 0), known[2], 0 }
  for _, key in ipairs(known[1]) do
    local entry, packed = read_entries(K, { key })[key], redis.call("HGET", K.messages, key)
    local d, flags, _, due = entry and parse_entry(entry), read_header(packed)
    if d and flags and d.token == token then -- fault: take-again
      local n = #reply
      reply[5], reply[n + 1], reply[n + 2], reply[n + 3] = known[3], key, d.due or due, packed
    end
  end
  return reply
end

-- Return a function that lets the messages of a batch enter their groups (new_admission). Its own functions are created
-- here, since few calls need them. `checked`: the slot has been validated.
local function load_admission(K, p, ranked, checked)
  --- @include "topics/lib/schedule/admission"
  return new_admission(K, p, ranked, checked)
end

-- Move due messages into the ready set. Return what `rank_due` returns.
local function rank_ready(K, p, now_ms)
  --- @include "topics/lib/schedule/rank"
  redis.call("HDEL", K.meta, "") -- see `take_messages`
  return rank_due(K, p, now_ms)
end

-- Note the deliveries of a reply, of a topic whose history has all transitions.
local function note_taken(K, p, reply, token, request, now_ms)
  --- @include "topics/lib/slot/message"
  --- @include "topics/lib/slot/history"
  for i = 6, #reply, 3 do
    local whole, m = pcall(decode_message, reply[i + 2]) -- a corrupt one is delivered, too
    note_transition(K, "taken", reply[i], token, whole and { attempts = m.attempts + 1, count = m.count, serial = m.serial })
  end
  write_history(K, p, string.sub(request, 1, 8), now_ms)
end

-- Take due messages of a slot, once per request. Requeue lapsed deliveries first, then deliver at most `want.most`
-- messages with `want.lease` ms. Limits: `flights` deliveries in flight (0 = unlimited) and one delivery per
-- `interval` us (0 = unlimited) with a `burst`. All messages together fit `max_call_bytes` or there is only one. A call
-- that requeues lapsed deliveries requeues at most 32 and delivers at most 32. Return {"ok", now ms, next due ms (0 =
-- none), lapsed, fencing token (of a paused slot: the record of the pause), then three a delivery: key, due ms, message}. On a problem return nil and the problem.
-- Then nothing was written.
local function take_messages(K, p, now_us, request, want)
  local now_ms = math.floor(now_us / 1000)
  local known_reply = recall_reply(K, request, now_ms)
  if known_reply and known_reply[1] == "foreign" then
    return nil, known_reply[3]
  elseif known_reply then -- fault: take-copy
    return replay_take(K, known_reply, now_ms)
  end
  local meta = redis.call("HMGET", K.meta, "v", "fence", "lease", "paused", "rate", "large", "taken", "term", "flushed")
  local done, problem = {}, nil
  local last, rate, flushed = tonumber(meta[2]) or 0, tonumber(meta[5]) or 0, tonumber(meta[9]) or 0
  K.large = meta[6] ~= false
  K.term = tonumber(meta[8]) or 0
  problem = check_layout(K, meta[1]) or corrupt_number(K.meta, "fence", last)
    or corrupt_number(K.meta, "lease", tonumber(meta[3]) or 0) or corrupt_number(K.meta, "rate", rate)
    or corrupt_number(K.meta, "term", K.term)
  -- A topic whose new revision has no priorities still delivers its ranked messages first.
  local ranked = p.ranked or redis.call("EXISTS", K.ready) == 1
  local jumped = last > now_us + 1000000
  if not problem and (ranked or jumped) then
    --- @include "topics/lib/validate/slot"
    problem = validate_slot(K)
  end
  if problem then
    return nil, problem
  end
  -- @allow *
  if jumped then
    rate = restart_times(K, now_us, want, rate)
  end
  local bytes
  bytes, problem = reclaim_lapsed(K, p, want.lease, now_ms, done, request)
  local wanted, opens = count_permitted(K, want, done.lapsed and math.min(want.most, 32) or want.most, meta[4], rate, now_us)
  local unranked, unsorted
  if wanted > 0 and ranked and not problem then
    unranked, unsorted = rank_ready(K, p, now_ms)
  end
  if unsorted and p.ranked then -- any of them may have the highest priority
    wanted, opens = 0, 0
  end

  local from, token = ranked and K.ready or K.scheduled, fence(last, now_us) -- fault: take-token
  local token_text, start = digits(token), nil
  local reply, keys, at, walked, taken, admit = { "ok", now_ms, 0, done.lapsed or 0, 0 }, {}, 5, 0, 0, nil
  -- Every pass delivers or moves what it reads, so messages behind a full group are read once. A call that has moved 64
  -- of them begins no further pass. Behind these there are probably more, so passes grow.
  while not problem and taken < wanted and walked - taken < 64 and bytes > 0 do
    local most = math.max(wanted - taken, walked - taken)
    local batch = read_due_batch(K, p, ranked, now_ms, most, bytes)
    if #batch.keys == 0 then
      problem = unranked
    end
    if batch.n == 0 then
      break
    end
    if walked == 0 then
      -- Start with HDEL: a server without memory refuses a script whose first write may allocate, and a backlog must drain.
      redis.call("HDEL", K.inflight, "")
      if K.term ~= want.lease and redis.call("ZCARD", K.leases) == 0 then
        K.term = want.lease
      end
      start = lease_end(K, token) == now_ms + want.lease and token_text or lease_start(K, now_ms + want.lease)
    end
    local entries, leases, moved, n, size, i = {}, {}, {}, 0, 0, 1
    while i <= batch.n and taken < wanted do
      local key, due, packed, group, admitted, again = batch.keys[i], batch.dues[i], batch.messages[i], "", true, false
      local flags, count, message_due, serial = read_header(packed)
      if flags and not ranked then
        due = due or serial > flushed and message_due or tonumber(redis.call("ZSCORE", from, key))
      end
      problem = not packed and missing_entry(from, batch.members[i]) or not (flags and due) and corrupt_entry(K.messages, key) or nil
      if not problem and flags > 1 then
        admit = admit or load_admission(K, p, ranked, ranked or done.lapsed)
        group, admitted, again = admit(batch, i)
        problem = not again and not group and admitted or nil
      end
      if problem then
        break -- the messages before it are delivered, and the next call reports it
      elseif not again then
        moved[i], i = batch.members[i], i + 1
      end
      if admitted and not again then
        local plain = count == 1 and due == message_due and group == ""
        if not plain or start ~= token_text then -- fault: plain
          entries[n + 1], entries[n + 2] = key, plain and token_text or format_entry(token_text, due, false, count, group)
          n = n + 2
        end
        leases[size + 1], leases[size + 2] = start, key
        size, taken = size + 2, taken + 1
        keys[taken], reply[at + 1], reply[at + 2], reply[at + 3] = key, key, due, packed
        at = at + 3
      end
    end
    bytes = batch.bytes
    if size > 0 then -- before the deliveries: if an ACL denies it, there are none
      record_take(K, want, token_text, taken, meta, rate, now_us)
    end
    write_batch(K, from, batch, entries, n, leases, size, moved)
    walked = walked + #moved
    if batch.crowded then
      -- The ready set orders any number of messages of one time. The next calls move the rest.
      problem = problem or unranked or not ranked and rank_ready(K, p, now_ms) or nil
    end
    if #moved == 0 or batch.crowded then
      break
    end
  end
  if problem and walked == 0 and not done.lapsed then
    return nil, problem
  end
  if taken < wanted then
    -- Fewer were due than permitted: the next message may go as soon as it is due.
    opens = 0
  end
  if taken > 0 then
    if p.history then
      note_taken(K, p, reply, token_text, request, now_ms)
    end
    reply[5] = token
  elseif meta[4] then
    reply[5] = meta[4]
  end
  add_counters(K, done)
  if taken > 0 or done.lapsed then
    remember_reply(K, request, now_ms, { keys, done.lapsed or 0, token })
  end
  reply[3] = next_due(K, now_ms, opens)
  return reply
end
