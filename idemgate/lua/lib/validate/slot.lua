-- Return a problem if one of the slot's keys holds data that idemgate did not write, else nil. It runs before the
-- first write: scripts do not roll back. A closed slot (reshard/close) returns "closed " and the change's name, and
-- that name as a second value. Querying a length costs less than querying a type. One EXISTS covers the seven keys
-- that are usually absent.
local function type_mismatch(target, expected)
  return target .. " holds a " .. redis.call("TYPE", target).ok .. ", expected a " .. expected
end
local function check_hash(target)
  if type(redis.pcall("HLEN", target)) == "table" then
    return type_mismatch(target, "hash")
  end
end
local function check_zset(target)
  if type(redis.pcall("ZCARD", target)) == "table" then
    return type_mismatch(target, "zset")
  end
end
local function check_rare_keys(K)
  if redis.call("EXISTS", K.grave, K.memo, K.busy, K.dead, K.fade, K.ready, K.line) > 0 then
    return check_hash(K.grave) or check_hash(K.memo) or check_hash(K.busy)
      or check_zset(K.dead) or check_zset(K.fade) or check_zset(K.ready) or check_zset(K.line)
  end
end
local function check_layout(K, layout)
  if layout and string.sub(layout, 1, 7) == "closed " then
    return layout, string.sub(layout, 8)
  elseif layout and layout ~= "1" then
    return K.facts .. " has layout " .. layout .. ", this version supports layout 1"
  end
end
local function validate_slot(K)
  local layout = redis.pcall("HGET", K.facts, "v")
  if type(layout) == "table" then
    return type_mismatch(K.facts, "hash")
  end
  local found = check_hash(K.pending) or check_hash(K.flight) or check_zset(K.due) or check_zset(K.lease)
    or check_hash(K.told[0]) or check_hash(K.told[1]) or check_rare_keys(K)
  if found then
    return found
  end
  return check_layout(K, layout)
end
