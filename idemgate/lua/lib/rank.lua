--- @include "lib/message"
--- @include "lib/sound"
--- @include "lib/score"
--- @include "lib/sortable"
-- Of a topic with priorities: what has come due gets its rank among the ready ones, at most 500 a call. Returns what is wrong with one
-- of them, and then nothing was written, or nil.
local function rank(K, p, now_ms)
  local found = redis.call("ZRANGEBYSCORE", K.due, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, 500)
  local messages = {}
  for i = 1, #found, 2 do
    messages[i] = sound_message(redis.call("HGET", K.pending, found[i]))
    if not messages[i] then
      return unsound(K.pending, found[i])
    end
  end
  for i = 1, #found, 2 do
    local key, due = found[i], tonumber(found[i + 1])
    local m = messages[i]
    if due ~= m[message.due] then
      m[message.due], m[message.why] = due, "flush"
      redis.call("HSET", K.pending, key, cmsgpack.pack(m))
    end
    redis.call("ZADD", K.ready, score(p, m), sortable(due, key))
    redis.call("ZREM", K.due, key)
  end
end
