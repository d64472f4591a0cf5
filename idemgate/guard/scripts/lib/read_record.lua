--- Keys: key
--- @include "guard/lib/format"
-- Return the record of one idempotency key as a table, or nil and the problem.
local function read_record(key)
  local state, kind, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited, cancelled =
    unpack_record(redis.pcall("GET", key), key)
  if not state then
    return nil, kind
  end
  return {
    state = state, kind = kind, owner = owner, fence = fence, attempts = attempts, taken = taken, ends = ends, since = since, print = print,
    data = data, lease = lease, held = held, waited = waited, cancelled = cancelled,
  }
end

-- Return the remaining lease of a record in progress, ms. It is at most one full lease, so a clock that jumps back
-- cannot lengthen it.
local function lease_left(ends, lease, now_ms)
  return math.min(ends - now_ms, lease)
end
