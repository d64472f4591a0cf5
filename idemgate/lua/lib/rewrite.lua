--- @include "lib/recorded"
-- Writes a record that exists in another state. PEXPIRE first: a server without memory refuses a script whose first write is SET, and
-- work that was done must be recorded all the same. For no time at all: it is gone.
local function rewrite(key, r, ms)
  redis.call("PEXPIRE", key, ms)
  if ms > 0 then
    redis.call("SET", key, recorded(r), "KEEPTTL")
  end
end
