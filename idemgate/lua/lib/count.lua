-- Adds to the slot's counters what this call did: a table name -> how many.
local function count(K, done)
  for name, n in pairs(done) do
    if n ~= 0 then
      redis.call("HINCRBY", K.facts, name, n)
    end
  end
end
