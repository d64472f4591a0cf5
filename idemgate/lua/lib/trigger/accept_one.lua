--- @include "lib/slot/message"
--- @include "lib/slot/counters"
--- @include "lib/trigger/new_message"
--- @include "lib/trigger/merge_plain"
--- @include "lib/trigger/merging"
-- Add a new message and schedule it unless its key is in flight. If no trigger of the call is checked for duplicates, new
-- messages with the same options share their prefix.
local function add_message(call, key, options, acc, serial)
  if not options.prefix or call.tracked then
    prepare_new(call.p, options, serial, call.now_ms)
  end
  local m = options.prefix .. acc
  call.pending[key] = m
  if #m > 1024 then
    track_large(call.K, m)
  end
  if call.in_flight[key] then
    call.changed[key] = true
    return
  end
  local n, at, words, scheduled = call.words_size, call.scheduled_size, call.words, call.scheduled
  words[n + 1], words[n + 2], scheduled[at + 1], scheduled[at + 2] = key, m, options.score, key
  call.words_size, call.scheduled_size = n + 2, at + 2
  if options.due < call.earliest then
    call.earliest = options.due
  end
end

-- Merge a trigger into a pending message: by its header if that is enough, else decoded.
local function merge_into(call, key, old, options, acc, serial)
  local due = type(old) == "string" and options.plain and merge_plain(call, key, acc, serial, not call.p.raw and load_merging().merge)
  if due then
    return "merged", due
  end
  local m = type(old) == "table" and old or decode_message(old)
  m.acc, call.accs[key] = call.accs[key] or m.acc, nil
  call.pending[key], call.changed[key] = m, true
  return load_merging().merge_trigger(call, key, m, options, acc, serial)
end

local function accept_tracked(call, key, options, acc, serial)
  local receipt, due = load_merging().check_dedup(call, key, options), call.now_ms
  if receipt then
    return receipt, due
  end
  local old = call.pending[key]
  if old then
    receipt, due = merge_into(call, key, old, options, acc, serial)
  else
    add_message(call, key, options, acc, serial)
    receipt = "scheduled"
    due = options.due
  end
  load_merging().remember_trigger(call, key, options, due)
  return receipt, due
end
