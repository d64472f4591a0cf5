-- Says which of our keys holds something we did not write, or nil. Looks before the first write: scripts do not roll back.
-- A slot that is closed (topic/close) is none that may be used: "closed " and by which change, which is also the second value.
local types = {
  due = "zset", pending = "hash", lease = "zset", flight = "hash", dead = "zset", grave = "hash", facts = "hash", memo = "hash",
  fade = "zset", ready = "zset", busy = "hash", line = "zset",
}
local function wrong(K)
  for name, expected in pairs(types) do
    local found = redis.call("TYPE", K[name]).ok
    if found ~= expected and found ~= "none" then
      return K[name] .. " holds a " .. found .. ", expected a " .. expected
    end
  end
  for i = 0, 1 do
    local found = redis.call("TYPE", K.told[i]).ok
    if found ~= "hash" and found ~= "none" then
      return K.told[i] .. " holds a " .. found .. ", expected a hash"
    end
  end
  local layout = redis.call("HGET", K.facts, "v")
  if layout and string.sub(layout, 1, 7) == "closed " then
    return layout, string.sub(layout, 8)
  elseif layout and layout ~= "1" then
    return K.facts .. " says layout " .. layout .. ", this program knows layout 1"
  end
end
