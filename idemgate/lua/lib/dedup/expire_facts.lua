-- Delete at most `limit` expired facts, so that no single call pays for all.
local function expire_facts(K, now_ms, limit)
  local old = redis.call("ZRANGEBYSCORE", K.dedup_expiry, "-inf", now_ms, "LIMIT", 0, limit)
  if #old > 0 then
    redis.call("ZREM", K.dedup_expiry, unpack(old))
    redis.call("HDEL", K.dedup, unpack(old))
  end
end
