--- @include "lib/advance"
--- @include "lib/fold"
--- @include "lib/message"
--- @include "lib/place"
--- @include "lib/unplace"
--- @include "lib/vacate"
--- @include "lib/weighed"
-- Puts a message that was given out back to the pending ones, due at `due`. A pending message of its key becomes one with it; a time
-- that its caller named wins. The pending one is the newer, unless `m` is a dead letter: then the last triggers tell.
-- Returns 1 if there was one, else 0.
local function restore(K, p, key, m, due, why)
  local waiting = redis.call("HGET", K.pending, key)
  m[message.due], m[message.why] = due, why
  if waiting then
    waiting = cmsgpack.unpack(waiting)
    local time = waiting[message.pinned] == 1 and waiting or m
    local kept = { [message.attempts] = m[message.attempts], [message.failure] = m[message.failure] }
    local groups = { m[message.group], waiting[message.group] }
    local stood = unplace(K, key, waiting)
    if stood and stood ~= waiting[message.due] then
      waiting[message.due], waiting[message.why] = stood, "flush"
    end
    kept[message.due], kept[message.why], kept[message.pinned] = time[message.due], time[message.why], time[message.pinned]
    m = waiting[message.last] < m[message.last] and fold(p.merge, waiting, m) or fold(p.merge, m, waiting)
    for at, value in pairs(kept) do
      m[at] = value
    end
    for _, group in ipairs(redis.call("HEXISTS", K.flight, key) == 0 and groups or {}) do
      -- The group it was in before lets it go; and where its caller named a time, which may be far, no group waits for that.
      if group ~= m[message.group] or waiting[message.pinned] == 1 then
        vacate(K, group, key, p.group_limit)
      else
        -- It may have been the first of it to go, and be so no more.
        advance(K, group, p.group_limit)
      end
    end
  end
  redis.call("HSET", K.pending, key, weighed(K, cmsgpack.pack(m)))
  place(K, key, m)
  return waiting and 1 or 0
end
