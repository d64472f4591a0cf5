-- Writes a record (as lib/record gives it) over one that exists in another state. PEXPIRE first: a server without memory refuses a script
-- whose first write is SET, and work that was done must be recorded all the same. For no time at all: it is gone.
local function rewrite(key, packed, ms)
  redis.call("PEXPIRE", key, ms)
  if ms ~= 0 and ms ~= "0" then
    redis.call("SET", key, packed, "KEEPTTL")
  end
end
