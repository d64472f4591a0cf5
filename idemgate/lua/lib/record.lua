--- @include "lib/fields"
-- The record of one idempotency key, as a table by field, or nil and what is wrong with the key. A missing key is an empty table.
local function record(key)
  local values = redis.pcall("HMGET", key, unpack(fields))
  if values.err then
    return nil, "holds another type than a hash"
  end
  local found = {}
  for i, name in ipairs(fields) do
    found[name] = values[i] or nil
  end
  local version = found.s and string.sub(found.s, 1, 1)
  if version and version ~= "1" or not version and redis.call("HLEN", key) > 0 then
    return nil, "holds a record of another layout"
  end
  found.s = found.s and string.sub(found.s, 2) or "absent"
  return found
end
