--- Keys: target
--- @include "topics/lib/slot/slot"
--- @include "lib/raise_refusal"
-- Return a problem if one of the slot's keys holds data that idemgate did not write, else nil. It runs before the
-- first write: scripts do not roll back. A closed slot (topics/reshard/close) returns "closed " and the change's name, and
-- that name as a second value. Querying a length costs less than querying a type. One EXISTS covers the eight keys
-- that are usually absent.
local function type_mismatch(target, expected, found)
  raise_refusal(found.err)
  return target .. " holds a " .. redis.call("TYPE", target).ok .. ", expected a " .. expected
end
local function check_hash(target)
  local found = redis.pcall("HLEN", target)
  if type(found) == "table" then
    return type_mismatch(target, "hash", found)
  end
end
local function check_zset(target)
  local found = redis.pcall("ZCARD", target)
  if type(found) == "table" then
    return type_mismatch(target, "zset", found)
  end
end
local function check_rare_keys(K)
  if redis.call("EXISTS", K.next, K.dead_data, K.dedup, K.group_active, K.dead, K.dedup_expiry, K.ready, K.group_waiting) > 0 then
    return check_hash(K.next) or check_hash(K.dead_data) or check_hash(K.dedup) or check_hash(K.group_active)
      or check_zset(K.dead) or check_zset(K.dedup_expiry) or check_zset(K.ready) or check_zset(K.group_waiting)
  end
end
local function validate_slot(K)
  local layout = redis.pcall("HGET", K.meta, "v")
  if type(layout) == "table" then
    return type_mismatch(K.meta, "hash", layout)
  end
  local found = check_hash(K.messages) or check_hash(K.inflight) or check_zset(K.scheduled) or check_zset(K.leases)
    or check_hash(K.replies[0]) or check_hash(K.replies[1]) or check_rare_keys(K)
    or K.results and (check_hash(K.results[0]) or check_hash(K.results[1]))
  if found then
    return found
  end
  return check_layout(K, layout)
end
