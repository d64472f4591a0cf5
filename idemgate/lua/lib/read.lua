--- @include "lib/fields"
-- The record of one idempotency key (lib/record) as a table, or nil and what is wrong with the key.
local function read(key)
  local state, kind, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited = fields(redis.pcall("GET", key))
  if not state then
    return nil, kind
  end
  return {
    state = state, kind = kind, owner = owner, fence = fence, attempts = attempts, taken = taken, ends = ends, since = since, print = print,
    data = data, lease = lease, held = held, waited = waited,
  }
end
