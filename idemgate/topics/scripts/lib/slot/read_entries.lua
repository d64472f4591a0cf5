--- @include "lib/now"
-- Return the entries of deliveries by key (topics/lib/slot/inflight), and those of them that are stored, or nil if the slot
-- stores none. The entry of a plain delivery is its token. `tokens` are the tokens that the caller expects, if it knows
-- them: then plain deliveries with other tokens may be missing.
local function read_entries(K, keys, tokens)
  local entries, stored, missing = {}, nil, #keys
  if redis.call("HLEN", K.inflight) > 0 then
    stored = {}
    for i, entry in ipairs(redis.call("HMGET", K.inflight, unpack(keys))) do
      if entry then
        entries[keys[i]], stored[keys[i]], missing = entry, entry, missing - 1
      end
    end
  end
  if missing == 0 then
    return entries, stored
  end
  -- A take delivers at most 100 messages. With few tokens, their keys cost a fraction of the scores of all keys.
  if tokens and #keys >= 16 then
    local known, distinct = {}, 0
    for i = 1, #keys do -- without `ipairs`: this runs for each delivery
      local token = tokens[i]
      if not known[token] and not entries[keys[i]] then
        known[token], distinct = true, distinct + 1
      end
    end
    if 16 * distinct <= #keys then
      for token in pairs(known) do
        local held = redis.call("ZRANGEBYSCORE", K.leases, token, token)
        for i = 1, #held do
          entries[held[i]] = entries[held[i]] or token
        end
      end
      return entries, stored
    end
  end
  for i, start in ipairs(redis.call("ZMSCORE", K.leases, unpack(keys))) do
    if start and not entries[keys[i]] then
      entries[keys[i]] = tokens and start == tokens[i] and start or digits(start)
    end
  end
  return entries, stored
end
