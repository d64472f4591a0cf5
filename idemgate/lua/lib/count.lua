-- Adds to the slot's counters what this call did: a table name -> how many.
local function count(K, done)
  for name, n in pairs(done) do
    if n ~= 0 then
      -- One that is no number begins anew: it is counted last, when nothing may fail any more.
      if type(redis.pcall("HINCRBY", K.facts, name, n)) == "table" then
        redis.call("HSET", K.facts, name, n)
      end
    end
  end
end
