--- Makes a part of the reply.
--- @include "topics/lib/schedule/due_times"
--- @include "lib/now"
-- Accept triggers with any options into messages of any kind. Return the reply, and whether
-- any of them was checked for duplicates. Its functions are created when it runs:
-- creating one costs about as much as querying a key, and most calls need none of them (accept_plain).
local function accept_any(t)
  --- @include "topics/lib/slot/counters"
  --- @include "topics/lib/slot/message"
  --- @include "topics/lib/schedule/hints"
  --- @include "topics/lib/trigger/pending"
  -- @allow *
  local K, p, now_ms, names = t.K, t.p, t.now_ms, { unpack(t.args, 7, 6 + t.n) }
  local call, tracked = new_call(t), false
  local codes = { scheduled = 0, merged = 1, replaced = 2, dropped = 3, duplicate = 4 }

  -- Return the functions that merge triggers, and those that find duplicates.
  local function load_merging()
    --- @include "topics/lib/trigger/merge_trigger"
    return { validate = validate_merges, merge = merge_trigger }
  end
  local function load_dedup()
    --- @include "topics/lib/trigger/dedup"
    return {
      validate = validate_dedup, is_known = is_known_event, check = check_dedup, remember = remember_trigger, store = store_dedup,
    }
  end

  -- Note the triggers that were dropped because of their version or a full message, or all that the topic's history has. A closed
  -- window is the usual path.
  local function note_noted()
    --- @include "topics/lib/slot/history"
    for _, one in ipairs(call.noted) do
      note_transition(K, one[1], one[2], nil, one[3], one[4])
    end
    write_history(K, p, string.sub(t.args[2], 1, 8), now_ms)
  end

  -- Let the history have a trigger that was accepted, or dropped for a reason that it does not have yet.
  local function add_noted(key, options, receipt, before)
    if #call.noted == before then
      local m = call.pending[key]
      m = receipt ~= "duplicate" and receipt ~= "dropped" and (type(m) == "string" and decode_message(m) or m) or nil
      call.noted[before + 1] = { receipt, key, m and { attempts = m.attempts, count = m.count, serial = m.serial } }
    end
    call.noted[before + 1][4] = options.event
  end

  -- Parse the options of a trigger: a time (parse_time), or {time or "", priority or "", group or "", version or "",
  -- event id (topics/lib/events) or "", trace (topics/lib/join_traces) or ""}. In the returned table, `at` is a time in
  -- ms or nil for the policy's.
  local function parse_options(given)
    if type(given) == "string" then
      return {
        at = parse_time(given, now_ms), priority = "", group = "", version = "", event = "", trace = "", tracked = p.leading,
      }
    end
    local at, priority, group, version, event, trace = unpack(given)
    return {
      at = parse_time(at, now_ms), priority = priority, group = group, version = version, event = event, trace = trace,
      tracked = p.leading or version ~= "" or event ~= "",
    }
  end

  -- Return the options of each trigger. Those that are the same for all are parsed once.
  local function parse_all()
    local kind, given, all = string.byte(t.options), t.times or t.options, {}
    if kind == DETAILED or kind == DETAILED_LIST then
      given = cmsgpack.unpack(given)
    end
    local shared = kind ~= TIMES and kind ~= DETAILED_LIST and parse_options(given)
    for n = 1, #names do
      all[n] = shared or parse_options(given[n])
      tracked = tracked or all[n].tracked
    end
    return all
  end

  -- Return what new messages with the same time share, with or without an extension (prepare_new).
  local prepared = { [true] = {}, [false] = {} }
  local function prepare(options, extended)
    local one = prepared[extended][options.at or ""]
    if not one then
      one = { prepare_new(p, options.at, call.new.serial, now_ms, extended) }
      prepared[extended][options.at or ""] = one
    end
    return unpack(one)
  end

  local function add_message(key, options, acc)
    local extended = options.version .. options.priority .. options.group .. options.trace ~= ""
    local header, due, score = prepare(options, extended)
    if options.group ~= "" then
      -- The messages of a group have serials of their own: those of one time are delivered in this order.
      header = with_serial(header, call.new.serial)
    end
    if extended then
      local traces = options.trace ~= "" and { 0, options.trace } or nil
      header = header .. encode_extension({ 0, "", options.version, options.priority, options.group, 0, "", traces and "", traces })
    end
    call.pending[key], call.changed[key] = header .. acc, true
    if not call.in_flight[key] then
      add_scheduled(call, key, due, score)
    end
    return "scheduled", due
  end

  local merging, dedup
  local function accept_trigger(key, options, acc)
    local receipt, due = options.tracked and dedup.check(call, key, options), now_ms
    if receipt then
      return receipt, due
    end
    local old = call.pending[key]
    if old then
      old = type(old) == "table" and old or decode_message(old)
      call.pending[key] = old
      receipt, due = merging.merge(call, key, old, options, acc)
    else
      receipt, due = add_message(key, options, acc)
    end
    if options.tracked and receipt ~= "dropped" then
      dedup.remember(call, key, options, due)
    end
    return receipt, due
  end

  local all_options = parse_all()
  read_pending(call, t, names)
  dedup = tracked and load_dedup()
  local problem = dedup and dedup.validate(call, names, all_options)
  -- A call that only creates messages writes to no key that it has not read. One that merges may write to any key of the slot.
  local merges = not t.distinct
  for n, key in ipairs(problem and {} or names) do
    merges = merges or call.pending[key] and not (dedup and dedup.is_known(call, all_options[n]))
  end
  merging = merges and load_merging()
  problem = problem or merging and merging.validate(call, names, all_options)
  if problem then
    return { "foreign", now_ms, problem }
  end
  local old_earliest, accepted, done, replied = earliest_due(K), 0, call.done, {}

  -- The first write is one that is refused when the server is out of memory: all or nothing.
  redis.call("HSET", K.meta, "v", "3", "accepted", digits(t.last_serial))
  for n = 1, #names do
    call.new.serial = t.last_serial + accepted + 1
    local before, lost = #call.noted, call.lost
    local receipt, due = accept_trigger(names[n], all_options[n], t.args[6 + t.given + n])
    if p.history then
      add_noted(names[n], all_options[n], receipt, before)
    end
    if codes[receipt] < codes.dropped then
      accepted = accepted + 1
    end
    done[receipt] = (done[receipt] or 0) + 1
    local code = codes[receipt]
    if call.lost > lost and code < codes.dropped then
      code = code + 5 -- merged or replaced in part
    end
    replied[n] = 8 * (due - now_ms) + code
  end
  write_pending(call)
  if dedup then
    dedup.store(call)
  end
  done.scheduled, done.accepted, done.items_dropped = nil, accepted, call.lost
  add_counters(K, done)
  if #call.noted > 0 then
    note_noted()
  end
  publish_hint(K, old_earliest, earliest_due(K))
  local reply, last = { "ok", now_ms }, 2 -- each code once, with the number of triggers in turn that have it
  for _, code in ipairs(replied) do
    if last > 2 and code == reply[last - 1] then
      reply[last] = reply[last] + 1
    else
      reply[last + 1], reply[last + 2], last = code, 1, last + 2
    end
  end
  return reply, tracked
end
