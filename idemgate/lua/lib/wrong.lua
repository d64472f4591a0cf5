-- Says which of our keys holds something we did not write, or nil. Looks before the first write: scripts do not roll back.
-- A slot that is closed (topics/close) is none that may be used: "closed " and by which change, which is also the second value.
-- Lengths are asked, since that costs less than types; seven keys that are seldom there are asked for at once.
local function other_than(target, expected)
  return target .. " holds a " .. redis.call("TYPE", target).ok .. ", expected a " .. expected
end
local function wrong_hash(target)
  if type(redis.pcall("HLEN", target)) == "table" then
    return other_than(target, "hash")
  end
end
local function wrong_zset(target)
  if type(redis.pcall("ZCARD", target)) == "table" then
    return other_than(target, "zset")
  end
end
local function wrong_seldom(K)
  if redis.call("EXISTS", K.grave, K.memo, K.busy, K.dead, K.fade, K.ready, K.line) > 0 then
    return wrong_hash(K.grave) or wrong_hash(K.memo) or wrong_hash(K.busy)
      or wrong_zset(K.dead) or wrong_zset(K.fade) or wrong_zset(K.ready) or wrong_zset(K.line)
  end
end
local function wrong_layout(K, layout)
  if layout and string.sub(layout, 1, 7) == "closed " then
    return layout, string.sub(layout, 8)
  elseif layout and layout ~= "1" then
    return K.facts .. " says layout " .. layout .. ", this program knows layout 1"
  end
end
local function wrong(K)
  local layout = redis.pcall("HGET", K.facts, "v")
  if type(layout) == "table" then
    return other_than(K.facts, "hash")
  end
  local found = wrong_hash(K.pending) or wrong_hash(K.flight) or wrong_zset(K.due) or wrong_zset(K.lease)
    or wrong_hash(K.told[0]) or wrong_hash(K.told[1]) or wrong_seldom(K)
  if found then
    return found
  end
  return wrong_layout(K, layout)
end
