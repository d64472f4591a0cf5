-- Says which of our keys holds something we did not write, or nil. Looks before the first write: scripts do not roll back.
-- A slot that is closed (topic/close) is none that may be used: "closed " and by which change, which is also the second value.
-- Lengths are asked, since that costs less than types; seven keys that are seldom there are asked for at once.
local hashes, zsets = { "facts", "pending", "flight" }, { "due", "lease" }
local seldom_hashes, seldom_zsets = { "grave", "memo", "busy" }, { "dead", "fade", "ready", "line" }
local function other_than(target, expected)
  return target .. " holds a " .. redis.call("TYPE", target).ok .. ", expected a " .. expected
end
local function wrong_hash(K, names)
  for _, name in ipairs(names) do
    if type(redis.pcall("HLEN", K[name])) == "table" then
      return other_than(K[name], "hash")
    end
  end
end
local function wrong_told(K)
  for i = 0, 1 do
    if type(redis.pcall("HLEN", K.told[i])) == "table" then
      return other_than(K.told[i], "hash")
    end
  end
end
local function wrong_zset(K, names)
  for _, name in ipairs(names) do
    if type(redis.pcall("ZCARD", K[name])) == "table" then
      return other_than(K[name], "zset")
    end
  end
end
local function wrong(K)
  local found = wrong_hash(K, hashes) or wrong_zset(K, zsets) or wrong_told(K)
  if not found and redis.call("EXISTS", K.grave, K.memo, K.busy, K.dead, K.fade, K.ready, K.line) > 0 then
    found = wrong_hash(K, seldom_hashes) or wrong_zset(K, seldom_zsets)
  end
  if found then
    return found
  end
  local layout = redis.call("HGET", K.facts, "v")
  if layout and string.sub(layout, 1, 7) == "closed " then
    return layout, string.sub(layout, 8)
  elseif layout and layout ~= "1" then
    return K.facts .. " says layout " .. layout .. ", this program knows layout 1"
  end
end
