--- @include "lib/lease_left"
--- @include "lib/recorded"
-- As `lease_left`, of a key that somebody asks for: where the clock was set back, the lease ends from now on as if it had begun now.
local function lease_holds(key, r, now_ms)
  local left = lease_left(r.ends, r.lease, now_ms)
  if left > 0 and r.ends ~= now_ms + left then
    r.ends = now_ms + left
    redis.call("SET", key, recorded(r), "KEEPTTL")
  end
  return left
end
