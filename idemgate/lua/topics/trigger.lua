--- Accept triggers of one slot. Each creates a pending message, or merges into the pending one of its key. A key in
--- flight gets a new pending message; the running one never changes.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] policy (lib/slot/policy)
--- ARGV[4] id of the preceding request, or "": if that one deferred any trigger, this one defers all, to keep per-key order
--- ARGV[5..] three a trigger: key; options (lib/schedule/options); accumulator
--- Returns {"ok", now ms, a number a trigger...}: 8 * (due time, ms from now) + 0 to 4, which stand for these, then
---         "scheduled" | "merged" | "replaced" | "dropped" | "duplicate", of which the last two have no due time; or 5: deferred
---         to another request, as are all behind it, because this call has read 128 KiB of messages to merge with
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot/slot"
--- @include "lib/validate/slot"
--- @include "lib/replies/replies"
--- @include "lib/slot/counters"
--- @include "lib/max_call_bytes"
--- @include "lib/slot/budget"
--- @include "lib/slot/policy"
--- @include "lib/schedule/due_by_policy"
--- @include "lib/schedule/options"
--- @include "lib/dedup/expire_facts"
--- @include "lib/schedule/hint"
--- @include "lib/slot/string_header"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local names, all_options, options = {}, {}, nil
for i = 5, #ARGV, 3 do
  local text, n = ARGV[i + 1], #names + 1
  if not options or text ~= options.text then -- one after the other they often ask for the same
    options = parse_options(text, now_ms)
    options.tracked = p.leading or options.version ~= "" or options.event ~= ""
  end
  names[n], all_options[n] = ARGV[i], options
end
local problem = validate_slot(K)
if problem then
  return { "foreign", now_ms, problem }
end
local known_reply = recall_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end

-- Return how many triggers fit into `max_call_bytes`, at least one. The stored data of a key counts when its key
-- first appears. A message that grows with each trigger counts an eighth each time, because it is packed again. If
-- the slot never held a large entry (track_large), and values are not merged one by one, the number of triggers
-- bounds the bytes.
local function count_accepted()
  local grows = p.merge.op == "append" or p.merge.op == "fields"
  local large, sizes, room = budget.by_value(p) or redis.call("HEXISTS", K.meta, "large") == 1, {}, max_call_bytes
  for n = 1, (grows or large) and #names or 0 do
    local key = names[n]
    local size = sizes[key]
    local cost = size and (grows and budget.cost(p, size) / 8 or 0)
    if not size then
      size = large and redis.call("HSTRLEN", K.pending, key) or 0
      cost = large and budget.cost(p, size) + redis.call("HSTRLEN", K.inflight, key) or 0
    end
    if cost > room and n > 1 then
      return n - 1
    end
    room, sizes[key] = room - cost, size + #ARGV[3 * n + 4]
  end
  return #names
end
local prior = ARGV[4] ~= "" and recall_reply(K, ARGV[4], now_ms)
if prior and prior[1] == "foreign" then
  return prior
end
-- Keep per-key order: if the preceding request is unknown or incomplete, do nothing. The client resends both.
local waits = ARGV[4] ~= "" and (not prior or prior[#prior] == 5)
local accepted = waits and 0 or #names > 1 and count_accepted() or #names
local stored = accepted > 0 and redis.call("HMGET", K.pending, unpack(names, 1, accepted)) or {}
local before, flying = earliest_due(K), redis.call("HLEN", K.inflight)

-- The functions that `define_merging` defines, and the event ids that were read.
local seen, check_dedup, remember_trigger, merge_trigger, validate_met, store_events_read
-- Pending messages of these keys, packed by this call or unpacked once. Changes are written together at the end.
-- `standing` caches scheduled times, false for keys that are not scheduled.
local pending, words, changed, scheduled, standing = {}, {}, {}, {}, {}
local earliest, shifted, pack = math.huge, false, cmsgpack.pack
local function schedule_all()
  if #scheduled > 0 then
    redis.call("ZADD", K.scheduled, unpack(scheduled))
    scheduled = {}
  end
end
local function write_all()
  for key, m in pairs(changed) do
    words[#words + 1] = key
    words[#words + 1] = track_large(K, pack(m))
  end
  if #words > 0 then
    redis.call("HSET", K.pending, unpack(words))
  end
  schedule_all()
  if seen then
    store_events_read()
  end
end

-- Define what a trigger needs to merge or deduplicate. Creating a function costs about as much as querying a key, and
-- most single triggers need none of these.
local function define_merging()
--- @include "lib/merge/merge_messages"
--- @include "lib/schedule/schedule"
--- @include "lib/schedule/unschedule"
--- @include "lib/group/group"
--- @include "lib/dedup/facts"
--- @include "lib/dedup/events"
--- @include "lib/validate/stored"

  -- Check for a duplicate event, an outdated version or a closed window. A stored fact names its group, because the
  -- group decides its slot after a reshard.
  function check_dedup(key, version, event, group)
    if event ~= "" and has_event(seen, event, now_ms) then
      return "duplicate"
    end
    if version ~= "" then
      local held = get_fact(K, "v" .. key, now_ms)
      if held and tonumber(version) < tonumber(string.match(held, "^[^ ]+")) then
        return "dropped"
      end
    end
    if p.leading and get_fact(K, "k" .. key, now_ms) then
      if p.quiet then
        set_fact(K, "k" .. key, group, now_ms + p.quiet)
      end
      return "dropped"
    end
  end

  function remember_trigger(key, version, event, due, group)
    if event ~= "" then
      add_event(seen, event, math.max(now_ms, due) + p.remember, now_ms)
    end
    if version ~= "" then
      set_fact(K, "v" .. key, group == "" and version or version .. " " .. group, now_ms + p.remember)
    end
    if p.leading then
      set_fact(K, "k" .. key, group, now_ms + (p.window or p.quiet))
    end
  end

  -- Group changes happen in the store, so scheduled times are written first and the cached ones are dropped.
  local function flush_scheduled()
    schedule_all()
    shifted, standing = true, {}
  end
  local function scheduled_at(key)
    if standing[key] == nil then
      schedule_all()
      standing[key] = tonumber(redis.call("ZSCORE", K.scheduled, key)) or false
    end
    return standing[key]
  end

  -- Move a changed pending message to the set where it now belongs. If the caller set another time between two
  -- attempts, the message leaves its group. `old` holds the fields that say where it was.
  local function reschedule_merged(key, old, stands, m, at)
    local other = old[message.priority] ~= m[message.priority]
    local elsewhere = old[message.group] ~= m[message.group]
    if stands then
      if m[message.due] ~= stands then
        shifted, standing[key] = true, m[message.due]
        scheduled[#scheduled + 1] = m[message.due]
        scheduled[#scheduled + 1] = key
      end
    elseif old[message.due] ~= m[message.due] or other or elsewhere then
      flush_scheduled()
      if unschedule(K, key, old) then
        schedule(K, key, m)
      end
    end
    local later = at or m[message.due] > (stands or old[message.due]) or elsewhere
    if old[message.group] == "" or not (later or other) or redis.call("HEXISTS", K.inflight, key) == 1 then
      return
    end
    flush_scheduled()
    if later then
      group_leave(K, old[message.group], key, p.group_limit)
    else
      -- The message may have been the next of its group and is no longer.
      group_promote(K, m[message.group], p.group_limit)
    end
  end

  -- Merge one trigger into the pending message of its key, and return its receipt. The table for the new trigger is
  -- created once and reused.
  local new = { 1, now_ms, now_ms, 0, 0, "", 0, "", "", "", "", "", 0, 0 }
  local ungrouped = { [message.group] = "" }
  function merge_trigger(key, old, options, acc, serial)
    -- The scheduled time, or false: behind a delivery of its key or group, or already ready.
    local stands = scheduled_at(key)
    local stood = ungrouped
    if not stands or old[message.group] .. options.group ~= "" then
      stood = {
        [message.due] = old[message.due], [message.priority] = old[message.priority], [message.group] = old[message.group],
        [message.rank] = old[message.rank],
      }
    end
    new[message.version], new[message.acc], new[message.priority] = options.version, acc, options.priority
    new[message.group], new[message.serial] = options.group, serial
    local receipt = "merged"
    local m = merge_messages(p.merge, old, new)
    if stands and stands ~= m[message.due] then
      m[message.due], m[message.why] = stands, "flush"
    end
    if options.at then
      receipt = "replaced"
      m[message.due], m[message.why], m[message.pinned] = options.at, "time", 1
    elseif m[message.pinned] == 0 and m[message.attempts] == 0 and m[message.why] ~= "retry" then
      -- The policy moves neither a time set by the caller nor a retry's time.
      m[message.due], m[message.why] = due_by_policy(p, m, false, now_ms)
    end
    pending[key], changed[key] = m, m
    reschedule_merged(key, stood, stands, m, options.at)
    return receipt, m[message.due]
  end

  -- Return a problem with the stored data that one trigger will touch, or nil: pending message, groups, version,
  -- events.
  function validate_met(key, packed, options)
    if options.event ~= "" then
      seen = seen or load_events(K)
      if not check_bucket(seen, bucket_of(seen, options.event)) then
        return seen.problem
      end
    end
    if packed and not pending[key] then
      pending[key] = validate_message(packed, p.merge)
      if not pending[key] then
        return corrupt_entry(K.pending, key)
      end
    end
    if options.version ~= "" then
      local name = "v" .. key
      local held = get_fact(K, name, now_ms)
      if held and not tonumber(string.match(held, "^[^ ]+") or "") then
        return corrupt_entry(K.dedup, name)
      end
    end
    if packed and (options.group ~= "" or pending[key][message.group] ~= "") then
      return validate_keys(K, p, { key }) or validate_group(K, options.group, p.group_limit)
    end
  end

  function store_events_read()
    store_events(seen)
  end
end

-- New messages with the same options share packed parts, which are packed once. They surround the accumulator, which
-- only lacks its string header.
local born = "\158" .. pack(1, now_ms, now_ms)
local function prepare_new(options)
  local due, why, pinned = options.at, "time", 1
  if not due then
    due, why = due_by_policy(p, { 1, now_ms, now_ms, now_ms, 0, "now" }, true, now_ms)
    pinned = 0
  end
  options.due, options.score = due, string.format("%.0f", due)
  options.before = born .. pack(due, 0, why, pinned, options.version)
  options.behind = options.priority .. options.group == "" and "\160\160\160" or pack("", options.priority, options.group)
  return options.before
end
-- Add a new message and schedule it, unless its key is in flight.
local function add_message(key, options, acc, serial)
  local before, n = options.before or prepare_new(options), #words
  local m = before .. (p.raw and string_header.of(#acc) or "") .. acc .. options.behind .. pack(serial) .. "\0"
  pending[key], words[n + 1], words[n + 2] = m, key, #m > 1024 and track_large(K, m) or m
  if flying == 0 or redis.call("HEXISTS", K.inflight, key) == 0 then
    n = #scheduled
    scheduled[n + 1], scheduled[n + 2] = options.score, key
    if options.due < earliest then
      earliest = options.due
    end
  end
  return "scheduled", options.due
end

local existing = {}
for n = 1, accepted do
  if stored[n] or all_options[n].tracked then
    if not merge_trigger then
      define_merging()
    end
    problem = validate_met(names[n], stored[n], all_options[n])
    if problem then
      return { "foreign", now_ms, problem }
    end
    existing[#existing + 1] = stored[n] and names[n] or nil
  end
end
if #existing > 0 then
  for n, score in ipairs(redis.call("ZMSCORE", K.scheduled, unpack(existing))) do
    standing[existing[n]] = tonumber(score) or false
  end
end
-- The first write is one that is refused when the server is out of memory: all or nothing.
redis.call("HSETNX", K.meta, "v", "2")
local codes = { scheduled = 0, merged = 1, replaced = 2, dropped = 3, duplicate = 4 }
local done, reply = {}, { "ok", now_ms }
local before_all = tonumber(redis.call("HGET", K.meta, "accepted")) or 0
local serial = before_all
for i = 5, 4 + 3 * accepted, 3 do
  local key, options, acc = ARGV[i], all_options[(i - 2) / 3], ARGV[i + 2]
  local receipt, due = options.tracked and check_dedup(key, options.version, options.event, options.group), now_ms
  if not receipt then
    local old = pending[key]
    serial = serial + 1
    if old then
      if not merge_trigger then
        define_merging() -- a message of this call
      end
      old = type(old) == "table" and old or cmsgpack.unpack(old)
      receipt, due = merge_trigger(key, old, options, p.raw and acc or cmsgpack.unpack(acc), serial)
    else
      receipt, due = add_message(key, options, acc, serial)
    end
    if options.tracked then
      remember_trigger(key, options.version, options.event, due, options.group)
    end
  end
  done[receipt] = (done[receipt] or 0) + 1
  reply[#reply + 1] = 8 * (due - now_ms) + codes[receipt]
end
for _ = accepted + 1, #names do
  reply[#reply + 1] = 5
end
done.scheduled, done.accepted = nil, serial - before_all
write_all()
add_counters(K, done)
expire_facts(K, now_ms, #ARGV)
publish_hint(K, before, shifted and earliest_due(K) or earliest < math.huge and earliest)
return remember_reply(K, ARGV[2], now_ms, reply)
