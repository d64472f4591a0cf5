--- @include "lib/lease_left"
--- @include "lib/record"
-- As `lease_left`, of a key that somebody asks for: where the clock was set back, the lease ends from now on as if it had begun now.
local function lease_holds(key, r, now_ms)
  local left = lease_left(r, now_ms)
  if left > 0 and r.ends ~= now_ms + left then
    r.ends = now_ms + left
    redis.call("SET", key, record(r), "KEEPTTL")
  end
  return left
end
