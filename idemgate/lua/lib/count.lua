-- Adds to the slot's counters what this call did: a table name -> how many.
local function count(K, done)
  for name, n in pairs(done) do
    -- What somebody else wrote there begins anew: it is too late to refuse.
    if n ~= 0 and type(redis.pcall("HINCRBY", K.facts, name, n)) == "table" then
      redis.call("HSET", K.facts, name, n)
    end
  end
end
