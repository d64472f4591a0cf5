--- @include "lib/fold"
--- @include "lib/message"
-- Puts a message that was given out back to the pending ones, due at `due`. A pending message of its key becomes one with it; a time
-- that its caller named wins. The pending one is the newer, unless `m` is a dead letter: then the last triggers tell.
-- Returns 1 if there was one, else 0.
local function restore(K, spec, key, m, due, why)
  local waiting = redis.call("HGET", K.pending, key)
  m[message.due], m[message.why] = due, why
  if waiting then
    waiting = cmsgpack.unpack(waiting)
    local time = waiting[message.pinned] == 1 and waiting or m
    local places = { [message.attempts] = m[message.attempts], [message.failure] = m[message.failure] }
    for _, place in ipairs({ message.due, message.why, message.pinned }) do
      places[place] = time[place]
    end
    m = waiting[message.last] < m[message.last] and fold(spec, waiting, m) or fold(spec, m, waiting)
    for place, value in pairs(places) do
      m[place] = value
    end
  end
  redis.call("HSET", K.pending, key, cmsgpack.pack(m))
  if redis.call("HEXISTS", K.flight, key) == 0 then
    redis.call("ZADD", K.due, m[message.due], key)
  end
  return waiting and 1 or 0
end
