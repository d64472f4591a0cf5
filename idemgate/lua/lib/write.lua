--- @include "lib/record"
-- Writes a record that expires after so many ms; one that is about to be refused for want of memory, if it is the first write.
local function write(key, r, ms)
  redis.call("SET", key, record(r), "PX", ms)
end
