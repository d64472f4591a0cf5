-- Writes a record (as lib/record gives it) over one that exists in another state. PEXPIRE first: a server without memory refuses a script
-- whose first write is SET, and work that was done must be recorded all the same. What has `wrote` before is refused nothing any more.
-- For no time at all: it is gone.
local function rewrite(key, packed, ms, wrote)
  if ms == 0 or ms == "0" then
    redis.call("PEXPIRE", key, ms)
  elseif wrote then
    redis.call("SET", key, packed, "PX", ms)
  else
    redis.call("PEXPIRE", key, ms)
    redis.call("SET", key, packed, "KEEPTTL")
  end
end
