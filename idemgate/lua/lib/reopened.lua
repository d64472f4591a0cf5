--- @include "lib/digits"
-- Tells workers that a slot which was closed by a limit on what is in flight has work and may be open: nobody sleeps until that.
local function reopened(K, p, due, now_ms)
  if p.limited and due > 0 and due <= now_ms then
    redis.pcall("PUBLISH", K.due, digits(now_ms))
  end
end
