--- @include "lib/validate/slot"
--- @include "lib/validate/problems"
--- @include "lib/validate/stored"
--- @include "lib/trigger/dedup"
-- Decode the pending messages. Return a problem with what the triggers touch, or nil.
local function validate_touched(call, names, all_options)
  local K, p = call.K, call.p
  local problem = validate_slot(K)
  for n, key in ipairs(problem and {} or names) do
    local options, m = all_options[n], call.pending[key]
    if type(m) == "string" then
      m = validate_message(m, p.merge)
      call.pending[key] = m
      problem = not m and corrupt_entry(call.in_flight[key] and K.next or K.messages, key)
        or validate_group(K, m.group, p.group_limit)
    end
    problem = problem or validate_group(K, options.group, p.group_limit) or options.tracked and validate_dedup(call, key, options)
    if problem then
      return problem
    end
  end
  return problem
end
