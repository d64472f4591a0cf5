--- Keys: key
-- Return the problem if a key of a consumed list has another type; nil if all are valid.
local function validate_list_keys(K)
  local types = { source = "list", incoming = "list", leases = "zset", state = "hash", data = "hash", dead = "list" }
  for part, key in pairs(K) do
    local found = redis.call("TYPE", key).ok
    if found ~= "none" and found ~= types[part] then
      return key .. " holds a " .. found .. ", expected a " .. types[part]
    end
  end
end
