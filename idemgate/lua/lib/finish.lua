--- @include "lib/place"
--- @include "lib/vacate"
--- @include "lib/message"
-- A delivery has ended for good: what waited behind it, of its key and of its group, is scheduled.
local function finish(K, p, key, m)
  local waiting = redis.call("HGET", K.pending, key)
  if waiting then
    place(K, key, cmsgpack.unpack(waiting))
  end
  vacate(K, m[message.group], key, p.group_limit)
end
