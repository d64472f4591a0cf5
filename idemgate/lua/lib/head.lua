-- The earliest due time of the slot, ms, or nil.
local function head(K)
  return tonumber(redis.call("ZRANGE", K.due, 0, 0, "WITHSCORES")[2])
end
