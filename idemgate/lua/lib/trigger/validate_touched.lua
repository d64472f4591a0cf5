--- @include "lib/slot/message"
--- @include "lib/validate/slot"
--- @include "lib/validate/problems"
--- @include "lib/trigger/merging"
-- Validate a packed message, and decode what merging needs: all of it, or its accumulator where payloads are computed.
local function validate_pending(call, key, packed, plain)
  if string.byte(packed) > 1 or not plain then
    call.pending[key] = call.accs[key] and packed or load_merging().validate_message(packed, call.p.merge)
    return call.pending[key] ~= nil
  elseif not call.p.raw and not call.accs[key] then
    local acc = load_merging().unpack_table(string.sub(packed, HEADER_SIZE + 1))
    call.accs[key], call.pending[key] = acc, string.sub(packed, 1, HEADER_SIZE)
    return acc and load_merging().is_accumulator(call.p.merge, acc)
  end
  return true
end

-- Return a problem with what the accepted triggers touch, or nil.
local function validate_touched(call, names, all_options, accepted, sweeps)
  local K, p = call.K, call.p
  local problem, all_checked = sweeps and (check_hash(K.dedup) or check_zset(K.dedup_expiry)), false
  for n = 1, (problem or call.existing == 0 and not sweeps) and 0 or accepted do
    local key, options, m = names[n], all_options[n], call.pending[names[n]]
    if type(m) == "string" and not (is_message(m) and validate_pending(call, key, m, options.plain)) then
      return corrupt_entry(call.in_flight[key] and K.next or K.messages, key)
    end
    m = call.pending[key]
    local group = type(m) == "table" and m.group or ""
    if m and (group ~= "" or options.group ~= "" or call.scores[key] == false) then
      local validate_group = load_merging().validate_group
      problem = not all_checked and validate_slot(K) or validate_group(K, group, p.group_limit) or validate_group(K, options.group, p.group_limit)
      all_checked = true
    end
    problem = problem or options.tracked and load_merging().validate_dedup(call, key, options)
    if problem then
      return problem
    end
  end
  return problem
end
