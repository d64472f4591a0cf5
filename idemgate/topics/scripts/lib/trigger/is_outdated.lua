-- Return true if a trigger of this key with this version would be dropped (topics/lib/trigger/dedup).
local function is_outdated(K, key, version, now_ms)
  local expires = version ~= "" and tonumber(redis.call("ZSCORE", K.dedup_expiry, "v" .. key))
  local held = expires and expires > now_ms and redis.call("HGET", K.dedup, "v" .. key)
  held = held and tonumber(string.match(held, "^[^ ]+") or "")
  return held and held > (tonumber(version) or held)
end
