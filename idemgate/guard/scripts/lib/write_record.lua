--- Keys: key
--- @include "guard/lib/read_record"
-- Pack a record given as the table that read_record returns.
local function pack_record_table(r)
  return pack_record(r.state, r.kind, r.owner, r.fence, r.attempts, r.taken, r.ends, r.since, r.print, r.data, r.lease, r.held, r.waited,
    r.cancelled)
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
