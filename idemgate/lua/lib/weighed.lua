-- A packed message or letter that is about to be stored. The first that is large is noted among the facts, so that lengths need not be
-- asked where there never was one (lib/portion).
local function weighed(K, packed)
  if #packed > 1024 then
    redis.call("HSET", K.facts, "large", 1)
  end
  return packed
end
