-- Add to the slot's counters: a table of name -> number.
local function add_counters(K, done)
  for name, n in pairs(done) do
    if n ~= 0 then
      -- A counter that is not a number restarts: an error here would follow the script's other writes.
      if type(redis.pcall("HINCRBY", K.meta, name, n)) == "table" then
        redis.call("HSET", K.meta, name, n)
      end
    end
  end
end

-- Return a packed message or dead letter that is about to be stored. Record the first large one, so that slots
-- without one never query lengths (count_within_budget).
local function track_large(K, packed)
  if #packed > 1024 then
    redis.call("HSET", K.meta, "large", 1)
  end
  return packed
end
