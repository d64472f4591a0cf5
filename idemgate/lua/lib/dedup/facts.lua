-- Store a fact about a name until `expires`, ms.
local function set_fact(K, name, value, expires)
  redis.call("HSET", K.memo, name, value)
  redis.call("ZADD", K.fade, expires, name)
end

-- Return the fact stored about a name, or nil if there is none or it expired. Expired facts may still be stored.
local function get_fact(K, name, now_ms)
  local expires = tonumber(redis.call("ZSCORE", K.fade, name))
  if expires and expires > now_ms then
    return redis.call("HGET", K.memo, name)
  end
end
