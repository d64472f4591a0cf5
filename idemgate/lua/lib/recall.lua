-- The fact kept about a name, or nil when there is none or its time has passed. Expiry is read, not left to a sweeper.
local function recall(K, name, now_ms)
  local expires = tonumber(redis.call("ZSCORE", K.fade, name))
  if expires and expires > now_ms then
    return redis.call("HGET", K.memo, name)
  end
end
