-- Writes a record that expires after so many ms; one that is about to be refused for want of memory, if it is the first write.
local function write(key, found, ms)
  redis.call("SET", key, cmsgpack.pack(found), "PX", ms)
end
