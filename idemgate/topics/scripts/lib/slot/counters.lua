--- @include "lib/now"
-- Return a stored counter as a number. One that is not a number restarts: an error would follow the script's other writes.
local function count_of(stored)
  return stored and string.find(stored, "^%d+$") and tonumber(stored) or 0
end

-- Add to the slot's counters: a table of name -> number.
local function add_counters(K, done)
  local names, words = {}, {}
  for name, n in pairs(done) do -- fault: counted
    if n ~= 0 then
      names[#names + 1] = name
    end
  end
  if #names == 0 then
    return
  end
  for i, before in ipairs(redis.call("HMGET", K.meta, unpack(names))) do
    words[2 * i - 1] = names[i]
    words[2 * i] = digits(count_of(before) + done[names[i]])
  end
  redis.call("HSET", K.meta, unpack(words))
end

-- Return a packed message or dead letter that is about to be stored. Record the first large one, so that slots
-- without one never query lengths (count_within_budget).
local function track_large(K, packed)
  if #packed > 1024 then
    redis.call("HSET", K.meta, "large", 1)
    K.large = true
  end
  return packed
end
