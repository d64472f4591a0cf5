-- Return the keys of one slot of a topic by name, in the order every topic script receives them. Data dictionary:
--   scheduled     zset  key -> due time, ms                  scheduled: pending and not blocked
--   pending       hash  key -> message (lib/slot/message)    waiting to be taken, or behind the delivery of the same key
--   leases        zset  key -> lease end, ms                 in flight
--   inflight      hash  key -> delivery (lib/slot/delivery)  in flight
--   dead          zset  fence -> time of death, ms           dead letters, by age
--   dead:data     hash  fence -> dead letter {key, message, reason, time of death, fence}
--   meta          hash  v layout; fence last token; lease the longest lease requested, ms; flushed the highest serial that a
--                       flush of the whole slot may have covered; large set once a message or dead letter exceeded 1 KiB
--                       (track_large); and one field per counter
--   dedup         hash  "k" key -> group; "v" key -> version, then a space and the group if any; "e", "e0"... event ids
--                       (lib/dedup/events)
--   dedup:expiry  zset  the "k" and "v" names -> expiry, ms
--   ready         zset  due time, key -> rank                due messages of a topic with priorities, best rank first
--   group:active  hash  group -> keys in flight or between two attempts
--   group:waiting zset  group, NUL, rank, NUL, due time, key -> 0   due messages that wait for their group (waiting_member)
--   replies0/1    hash  request id -> its reply, for even / odd half minutes; "" -> number of the half minute
local function slot(keys)
  return {
    scheduled = keys[1], pending = keys[2], leases = keys[3], inflight = keys[4], dead = keys[5], dead_data = keys[6],
    meta = keys[7], dedup = keys[8], dedup_expiry = keys[9], ready = keys[10],
    group_active = keys[11], group_waiting = keys[12], replies = { [0] = keys[13], [1] = keys[14] },
  }
end
