-- The keys of one slot of a topic, by name, in the order in which every topic script gets them. Data dictionary:
--   due      zset  key -> due time, ms                  scheduled: pending and not blocked
--   pending  hash  key -> message (lib/message)         waiting to be taken, or behind the delivery of the same key
--   lease    zset  key -> lease end, ms                 in flight
--   flight   hash  key -> delivery (lib/delivery)       in flight
--   dead     zset  fence -> when it died, ms            dead letters, by age
--   grave    hash  fence -> dead letter {key, message, reason, died at, fence}
--   facts    hash  v layout, fence last token, lease the longest asked for, ms, flushed the highest serial of what may have been flushed
--                  with all others, large that it has held a message or letter of more than 1 KiB (lib/weighed), and one counter a name
--   memo     hash  "k" key -> group; "v" key -> version, a space and the group if there is one; "e", "e0"... event ids (lib/events)
--   fade     zset  the names of "k" and "v" -> when to forget, ms
--   ready    zset  due time, key -> rank               due, of a topic with priorities, best rank first
--   busy     hash  group -> keys in flight or between two attempts
--   line     zset  group, NUL, rank, NUL, due time, key -> 0   due, and behind its group (lib/lined)
--   told0/1  hash  request id -> reply given, of even / odd half minutes; "" -> which half minute
local function slot(keys)
  return {
    due = keys[1], pending = keys[2], lease = keys[3], flight = keys[4], dead = keys[5], grave = keys[6],
    facts = keys[7], memo = keys[8], fade = keys[9], ready = keys[10],
    busy = keys[11], line = keys[12], told = { [0] = keys[13], [1] = keys[14] },
  }
end
