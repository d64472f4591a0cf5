--- @include "lib/record/format"
-- Return the record of one idempotency key as a table, or nil and the problem.
local function read_record(key)
  local state, kind, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited = unpack_record(redis.pcall("GET", key))
  if not state then
    return nil, kind
  end
  return {
    state = state, kind = kind, owner = owner, fence = fence, attempts = attempts, taken = taken, ends = ends, since = since, print = print,
    data = data, lease = lease, held = held, waited = waited,
  }
end

-- Return the remaining lease of a record in progress, ms. It is at most one full lease, so a clock that jumps back
-- cannot lengthen it.
local function lease_left(ends, lease, now_ms)
  return math.min(ends - now_ms, lease)
end

-- Pack a record given as the table that read_record returns.
local function pack_record_table(r)
  return pack_record(r.state, r.kind, r.owner, r.fence, r.attempts, r.taken, r.ends, r.since, r.print, r.data, r.lease, r.held, r.waited)
end

-- Write a record that expires after `ms`. SET accepts digits as text, so `ms` may be the argument as it came. As the
-- first write of a script, it is refused when the server is out of memory.
local function write_record(key, r, ms)
  redis.call("SET", key, pack_record_table(r), "PX", ms)
end

-- Return the remaining lease, ms. If the clock jumped back, shorten the stored lease to one full lease from now.
local function clamp_lease(key, r, now_ms)
  local left = lease_left(r.ends, r.lease, now_ms)
  if left > 0 and r.ends ~= now_ms + left then
    r.ends = now_ms + left
    redis.call("SET", key, pack_record_table(r), "KEEPTTL")
  end
  return left
end
