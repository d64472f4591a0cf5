-- Writes a record that exists in another state. PEXPIRE first: a server without memory refuses a script whose first write is SET, and
-- work that was done must be recorded all the same.
local function rewrite(key, found, ms)
  redis.call("PEXPIRE", key, ms)
  redis.call("SET", key, cmsgpack.pack(found), "KEEPTTL")
end
