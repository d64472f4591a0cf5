--- Keys: log
--- @include "lib/now"
-- Return the stored reply of this request, or nil. Replies are stored for 30 to 60 s. A request that was part of a larger
-- one, sent to a slot that has moved, carries both ids. Its own id (16 bytes) comes first, and the reply found may be the
-- larger one's. Only the last 14 bytes of an id are stored (8 random, 6 a counter). A reply's time counts from the start
-- of its half minute. With its reply, an id takes 16 bytes instead of 32.
local function recall_reply(K, request, now_ms)
  local half = math.floor(now_ms / 30000)
  for at = 1, #request > 16 and #request or 1, 16 do
    local id, log, period = string.sub(request, at + 2, at + 15), K.replies[half % 2], half
    local found = redis.call("HMGET", log, "", id)
    local packed = found[2]
    K.period = found[1] -- of the hash that `remember_reply` writes to
    if not packed or tonumber(K.period) ~= half then
      log = K.replies[(half + 1) % 2]
      packed = redis.call("HGET", log, id)
      period = packed and tonumber(redis.call("HGET", log, ""))
      -- A later half minute is one from which the clock stepped back.
      packed = period and math.abs(period - half) == 1 and packed
    end
    if packed then
      local whole, reply = pcall(cmsgpack.unpack, packed)
      if not whole or type(reply) ~= "table" or type(reply[2]) ~= "number" then
        return { "foreign", now_ms, log .. " holds a corrupt reply" }
      end
      reply[2] = type(reply[1]) == "string" and period * 30000 + reply[2] or reply[2]
      return reply
    end
  end
end

-- Store the reply of a request, so that a retry gets the same answer and has no second effect. Call it after
-- `recall_reply`, and after the first write that may be refused when the server is out of memory.
local function remember_reply(K, request, now_ms, reply)
  local half = math.floor(now_ms / 30000)
  local log = K.replies[half % 2]
  if tonumber(K.period) ~= half then
    -- @allow HSET PEXPIRE
    K.period = digits(half)
    redis.call("UNLINK", log) -- it may hold a hundred thousand replies, and another thread frees them
    -- A value of more than 64 bytes makes the hash a table. The server would search a small hash from its beginning.
    redis.call("HSET", log, "", K.period .. string.rep(" ", 64))
    redis.call("PEXPIRE", log, 120000)
  end
  local timed = type(reply[1]) == "string" -- a word and the time; what `take` keeps of its own is not
  reply[2] = timed and now_ms - half * 30000 or reply[2]
  redis.call("HSET", log, string.sub(request, 3, 16), cmsgpack.pack(reply))
  reply[2] = timed and now_ms or reply[2]
  return reply
end
