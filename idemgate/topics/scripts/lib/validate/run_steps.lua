-- Run the steps of a script and return its reply. The steps read each key before the first write or make it the first one
-- written. So a key of another type ends them while nothing is written. Only then the key at fault is searched for.
local function run_steps(K, now_ms, steps)
  local done, reply = pcall(steps)
  if done then
    return reply
  end
  --- @include "topics/lib/validate/slot"
  local problem = validate_slot(K)
  if problem then
    return { "foreign", now_ms, problem }
  elseif type(reply) == "string" then
    -- An error with a code (READONLY, OOM) is returned. Raised again, it would begin with ERR.
    return string.find(reply, "^%u+ ") and { err = reply } or error(reply, 0)
  end
  return reply
end
