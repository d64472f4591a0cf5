--- @include "lib/schedule/due_times"
--- @include "lib/digits"
--- @include "lib/trigger/new_message"
-- Accept triggers with any options into messages of any kind. Return the reply, and whether
-- any of them was checked for duplicates. Its functions are created when it runs:
-- creating one costs about as much as querying a key, and most calls need none of them (accept_plain).
local function accept_any(t)
  --- @include "lib/slot/counters"
  --- @include "lib/slot/message"
  --- @include "lib/schedule/next_due"
  --- @include "lib/trigger/read_stored"
  --- @include "lib/trigger/merge_trigger"
  --- @include "lib/trigger/dedup"
  local K, p, now_ms, names = t.K, t.p, t.now_ms, { unpack(t.names, 1, t.n) }
  local call, tracked = new_call(K, p, now_ms), false
  local codes = { scheduled = 0, merged = 1, replaced = 2, dropped = 3, duplicate = 4 }

  -- Parse the options of a trigger: a time (parse_time), or {time or "", priority or "", group or "", version or "", event id
  -- (lib/dedup/events) or ""}. In the returned table, `at` is a time in ms or nil for the policy's.
  local function parse_options(given)
    if type(given) == "string" then
      return { at = parse_time(given, now_ms), priority = "", group = "", version = "", event = "", tracked = p.leading }
    end
    local at, priority, group, version, event = unpack(given)
    return {
      at = parse_time(at, now_ms), priority = priority, group = group, version = version, event = event,
      tracked = p.leading or version ~= "" or event ~= "",
    }
  end

  -- Return the options of each trigger. Those that are the same for all are parsed once.
  local function parse_all()
    local given, all = t.options, {}
    if string.byte(given) == DETAILED or string.byte(given) == DETAILED_LIST then
      given = cmsgpack.unpack(given)
    end
    local shared = string.byte(t.options) ~= DETAILED_LIST and parse_options(given)
    for n = 1, #names do
      all[n] = shared or parse_options(given[n])
      tracked = tracked or all[n].tracked
    end
    return all
  end

  -- Add a new message. Its serial is that of the last trigger, unless some triggers may be dropped.
  local function add_message(key, options, acc, serial)
    if not options.prefix or tracked then
      local extension
      if options.version .. options.priority .. options.group ~= "" then
        extension = cmsgpack.pack({ 0, "", options.version, options.priority, options.group, 0, "" })
        extension = struct.pack(">I4", #extension) .. extension
      end
      options.prefix, options.due, options.score =
        prepare_new(p, options.at, tracked and serial or t.last_serial + #names, now_ms, extension)
    end
    call.pending[key], call.changed[key] = options.prefix .. acc, true
    if not call.in_flight[key] then
      add_scheduled(call, key, options.due, options.score)
    end
    return "scheduled", options.due
  end

  local function accept_one(key, options, acc, serial)
    local receipt, due = options.tracked and check_dedup(call, key, options), now_ms
    if receipt then
      return receipt, due
    end
    local old = call.pending[key]
    if old then
      old = type(old) == "table" and old or decode_message(old)
      call.pending[key] = old
      receipt, due = merge_trigger(call, key, old, options, acc, serial)
    else
      receipt, due = add_message(key, options, acc, serial)
    end
    if options.tracked then
      remember_trigger(call, key, options, due)
    end
    return receipt, due
  end

  local all_options = parse_all()
  read_pending(call, t, names)
  local problem = validate_touched(call, names, all_options)
  if problem then
    return { "foreign", now_ms, problem }
  end
  local old_earliest, serial, done, replied = earliest_due(K), t.last_serial, {}, {}

  -- The first write is one that is refused when the server is out of memory: all or nothing.
  redis.call("HSET", K.meta, "v", "2", "accepted", digits(serial))
  for n = 1, #names do
    local receipt, due = accept_one(names[n], all_options[n], t.accs[n], serial + 1)
    if codes[receipt] < codes.dropped then
      serial = serial + 1
    end
    done[receipt] = (done[receipt] or 0) + 1
    replied[n] = 8 * (due - now_ms) + codes[receipt]
  end
  write_pending(call)
  if call.events then
    store_events(call.events)
  end
  done.scheduled, done.accepted = nil, serial - t.last_serial
  add_counters(K, done)
  publish_hint(K, old_earliest, earliest_due(K))
  return reply_of(t, replied), tracked
end
