-- Keeps a small fact about a name until `expires`, ms.
local function remember(K, name, value, expires)
  redis.call("HSET", K.memo, name, value)
  redis.call("ZADD", K.fade, expires, name)
end
