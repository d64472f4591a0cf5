--- @include "lib/recorded"
-- Writes a record that expires after so many ms (as digits they need not be made into digits); one that is about to be refused for want of memory, if it is the first write.
local function write(key, r, ms)
  redis.call("SET", key, recorded(r), "PX", ms)
end
