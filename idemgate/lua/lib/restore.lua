--- @include "lib/fold"
--- @include "lib/message"
-- Puts a message that was given out back to the pending ones, due at `due`. A newer pending message of its key is folded into it;
-- a time that the newer one's caller named wins. Returns 1 if it was folded, else 0.
local function restore(K, spec, key, m, due, why)
  local newer = redis.call("HGET", K.pending, key)
  m[message.due], m[message.why] = due, why
  if newer then
    newer = cmsgpack.unpack(newer)
    m = fold(spec, m, newer)
    if newer[message.pinned] == 1 then
      m[message.due], m[message.why], m[message.pinned] = newer[message.due], newer[message.why], 1
    end
  end
  redis.call("HSET", K.pending, key, cmsgpack.pack(m))
  if redis.call("HEXISTS", K.flight, key) == 0 then
    redis.call("ZADD", K.due, m[message.due], key)
  end
  return newer and 1 or 0
end
