--- Keys: hash, zset
-- Write the first `n` values of `entries` to a hash and the first `m` of `scored` to a sorted set: keys of messages, with a
-- value or a score each. The server keeps small hashes and sets as lists, and each command searches a list from its beginning.
-- That would take most of the time of a script that adds or removes a hundred keys. A value of more than 64 bytes turns a
-- list into a table, for as long as the key exists. No key of a message is empty, and no score is 0.
local function add_entries(hash, entries, n, zset, scored, m)
  local long, added = string.rep("-", 65), 0
  if n >= 32 then
    redis.call("HSET", hash, "", long)
  end
  if m >= 32 and redis.call("ZCARD", zset) <= 128 then -- by default, a larger set is a table already
    added = redis.call("ZADD", zset, "NX", "0", long)
  end
  if n > 0 then
    redis.call("HSET", hash, unpack(entries, 1, n))
  end
  if m > 0 then
    redis.call("ZADD", zset, unpack(scored, 1, m))
  end
  if n >= 32 then
    redis.call("HDEL", hash, "")
  end
  if added == 1 and redis.call("ZSCORE", zset, long) == "0" then -- else it is a key of this call
    redis.call("ZREM", zset, long)
  end
end
