-- Reopen the window of a leading edge whose message was cancelled or died: nothing ran for it, so the next trigger is accepted.
local function reopen_window(K, p, key)
  if p.leading then
    redis.call("HDEL", K.dedup, "k" .. key)
    redis.call("ZREM", K.dedup_expiry, "k" .. key)
  end
end
