--- @include "lib/digits"
-- The number of a dead letter: the token of its delivery. Slots that became one may have given the same: then the next lower one
-- that is free, for those above may be the tokens of deliveries to come.
local function letter_id(K, token)
  while redis.call("HEXISTS", K.grave, digits(token)) == 1 do
    token = token - 1
  end
  return token
end
