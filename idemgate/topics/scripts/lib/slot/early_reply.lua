--- Makes a part of the reply.
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/replies"
-- Return the reply of a request that must not run: the slot holds data that idemgate did not write, the request ran before,
-- or the data of its `key`, if any, are corrupt. Return nil for all others.
local function early_reply(K, request, now_ms, p, key)
  local problem = validate_slot(K)
  local known_reply = not problem and recall_reply(K, request, now_ms) -- fault: early-copy
  if known_reply then
    return known_reply
  end
  problem = problem or key and validate_keys(K, p, { key })
  return problem and { "foreign", now_ms, problem } or nil
end
