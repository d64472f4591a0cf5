--- Accept triggers of one slot. Each creates a pending message, or merges into the pending one of its key. A trigger of a
--- key in flight creates the next message of that key, or merges into it. The message in flight never changes.
--- KEYS[1..15] slot
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
--- @include "lib/slot/policy"
--- @include "lib/schedule/options"
--- @include "lib/dedup/expire_facts"
--- @include "lib/schedule/hint"
--- @include "lib/trigger/count_accepted"
--- @include "lib/trigger/pending"
--- @include "lib/trigger/accept_one"
--- @include "lib/trigger/merging"
--- @include "lib/trigger/validate_touched"
local K, p = slot(KEYS), policy(ARGV[3])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local codes = { scheduled = 0, merged = 1, replaced = 2, dropped = 3, duplicate = 4 }

-- Parse the arguments: keys, options and accumulators of the triggers. `tracked`: any has to be checked for duplicates.
local function parse_triggers()
  local names, all_options, accs, options, tracked = {}, {}, {}, nil, false
  local n = 0
  for i = 5, #ARGV, 3 do
    local text = ARGV[i + 1]
    n = n + 1
    if not options or text ~= options.text then -- one after the other they often ask for the same
      options = parse_options(text, now_ms)
      options.tracked = p.leading or options.version ~= "" or options.event ~= ""
      tracked = tracked or options.tracked
    end
    names[n], all_options[n], accs[n] = ARGV[i], options, ARGV[i + 2]
  end
  return names, all_options, accs, tracked
end

-- Return how many triggers this call accepts, or nil and the reply if the preceding request failed.
local function accept(names, accs)
  local prior = ARGV[4] ~= "" and recall_reply(K, ARGV[4], now_ms)
  if prior and prior[1] == "foreign" then
    return nil, prior
  elseif ARGV[4] ~= "" and (not prior or prior[#prior] == 5) then
    return 0 -- keep per-key order: the preceding request is unknown or incomplete, so the client resends both
  end
  return #names > 1 and count_accepted(K, p, names, accs) or #names
end

-- Accept the triggers and return the reply, and the number of triggers for each receipt.
local function accept_triggers(call, names, all_options, accs, accepted, before_all)
  local serial, done, reply, pending = before_all, {}, { "ok", now_ms }, call.pending
  for n = 1, accepted do
    local key, options, acc, receipt, due = names[n], all_options[n], accs[n], nil, nil
    local next_serial = call.tracked and serial + 1 or before_all + accepted
    if not options.tracked and not pending[key] then
      add_message(call, key, options, acc, next_serial)
      serial = serial + 1
      reply[2 + n] = 8 * (options.due - now_ms)
    else
      if options.tracked then
        receipt, due = accept_tracked(call, key, options, acc, next_serial)
      else
        receipt, due = merge_into(call, key, pending[key], options, acc, next_serial)
      end
      if receipt ~= "dropped" and receipt ~= "duplicate" then
        serial = serial + 1
      end
      done[receipt] = (done[receipt] or 0) + 1
      reply[2 + n] = 8 * (due - now_ms) + codes[receipt]
    end
  end
  for n = accepted + 1, #names do
    reply[2 + n] = 5
  end
  done.scheduled, done.accepted = nil, call.tracked and serial - before_all or nil
  return reply, done
end

local function steps()
  local meta = redis.call("HMGET", K.meta, "v", "accepted", "large", "flushed")
  local problem = check_layout(K, meta[1])
  if problem then
    return { "foreign", now_ms, problem }
  end
  K.large = meta[3] ~= false
  local known_reply = recall_reply(K, ARGV[2], now_ms)
  if known_reply then
    return known_reply
  end
  local names, all_options, accs, tracked = parse_triggers()
  local accepted, failed = accept(names, accs)
  if not accepted then
    return failed
  end
  local call, before, before_all = new_call(K, p, now_ms), earliest_due(K), tonumber(meta[2]) or 0
  call.tracked = tracked
  if accepted > 0 then
    read_pending(call, accepted < #names and { unpack(names, 1, accepted) } or names, tonumber(meta[4]) or 0)
  end
  -- Delete expired facts with triggers that store some, and with every 64th other.
  local sweeps = tracked or before_all % 64 + accepted >= 64
  problem = validate_touched(call, names, all_options, accepted, sweeps)
  if problem then
    return { "foreign", now_ms, problem }
  end

  -- The first write is one that is refused when the server is out of memory: all or nothing.
  redis.call("HSET", K.meta, "v", "2", "accepted", string.format("%.0f", before_all + (tracked and 0 or accepted)))
  local reply, done = accept_triggers(call, names, all_options, accs, accepted, before_all)
  write_pending(call)
  if call.events then
    load_merging().store_events(call.events)
  end
  add_counters(K, done)
  if sweeps then
    expire_facts(K, now_ms, #ARGV)
  end
  publish_hint(K, before, call.shifted and earliest_due(K) or call.earliest < math.huge and call.earliest)
  return remember_reply(K, ARGV[2], now_ms, reply)
end
return run_steps(K, now_ms, steps)
