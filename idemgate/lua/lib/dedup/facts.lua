-- Store a fact about a name until `expires`, ms.
local function set_fact(K, name, value, expires)
  redis.call("HSET", K.dedup, name, value)
  redis.call("ZADD", K.dedup_expiry, expires, name)
end

-- Return the fact stored about a name, or nil if there is none or it expired. Expired facts may still be stored.
local function get_fact(K, name, now_ms)
  local expires = tonumber(redis.call("ZSCORE", K.dedup_expiry, name))
  if expires and expires > now_ms then
    return redis.call("HGET", K.dedup, name)
  end
end
