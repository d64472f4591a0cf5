-- Return the keys of one slot of a topic by name, in the order every topic script receives them. Steps of a script also
-- cache values there: `large` and `term` (fields of meta) and `period` (topics/lib/replies). Data dictionary:
--   scheduled     zset  key -> due time, ms                  pending, and not blocked
--   messages      hash  key -> message (topics/lib/slot/header)     from its first trigger until it is settled
--   next          hash  key -> message                       triggered while the key's delivery is in flight
--   leases        zset  key -> start of the lease, us        in flight (topics/lib/slot/inflight)
--   inflight      hash  key -> entry of a delivery           only of deliveries that are not plain
--   dead          zset  id -> time of death, ms              dead letters, by age
--   dead:data     hash  id -> dead letter {key, message, reason, time of death, id}
--   meta          hash  v layout, or "closed " and the id of the change; fence last token, or the latest known time, us;
--                       lease the longest lease requested, ms; term from the start to the end of a lease, ms; flushed
--                       the highest serial that a flush of the whole slot may have covered; large set once a message or
--                       dead letter exceeded 1 KiB (track_large); rate time of the next delivery, us; paused time of the
--                       pause, ms, a space, then who paused it and why, packed; opened, batch, gone, from:<slot> state of a change of slots (reshard/*); and one field per counter
--   dedup         hash  "k" key -> group; "v" key -> version, then a space and the group if any; "e", "e0"... event ids
--                       (topics/lib/events)
--   dedup:expiry  zset  the "k" and "v" names -> expiry, ms
--   ready         zset  due time, serial or -, key -> rank        due messages of a topic with priorities, or of groups if a ms
--                                                            is crowded (ready_member), best rank first
--   group:active  hash  group -> keys in flight or between two attempts
--   group:waiting zset  group, NUL, rank, NUL, due time, serial, key -> 0   due messages that wait for their group (waiting_member)
--   replies0/1    hash  request id -> its reply, for even / odd half minutes; "" -> number of the half minute
-- Scripts that end deliveries add `results`: the hashes of topics/lib/slot/store_result, if the topic stores results.
local function slot(keys)
  return {
    scheduled = keys[1], messages = keys[2], next = keys[3], leases = keys[4], inflight = keys[5], dead = keys[6],
    dead_data = keys[7], meta = keys[8], dedup = keys[9], dedup_expiry = keys[10], ready = keys[11],
    group_active = keys[12], group_waiting = keys[13], replies = { [0] = keys[14], [1] = keys[15] },
  }
end

-- Unpack the topic policy sent by the client, a packed map. Times are in ms; an absent field means no limit:
--   window quiet max_delay max_size leading   when a message is due
--   merge raw                                 how payloads merge (topics/lib/payloads); raw = accumulators are not packed
--   remember                                  how long event ids and versions are stored
--   attempts retention max_dead               deliveries per message; age and number of dead letters
--   ranked boost                              the topic has priorities; time that one priority is worth, absent = strict
--   retry_penalty                             points of priority that a failed attempt takes away
--   group_limit                               concurrent deliveries per group
--   limited                                   the number of deliveries in flight is limited
--   results                                   how long results of deliveries are stored
--   hidden                                    the history has digests of keys
--   history                                   number of transitions to keep, of all messages; absent = only some (topics/lib/slot/history)
local function policy(packed)
  return cmsgpack.unpack(packed)
end

-- Return a problem with the layout of the slot, or nil. A closed slot (topics/reshard/close) returns "closed " and the change's name,
-- and that name as a second value.
local function check_layout(K, layout)
  if layout and string.sub(layout, 1, 7) == "closed " then
    return layout, string.sub(layout, 8)
  elseif layout and layout ~= "3" then
    return K.meta .. " has layout " .. layout .. ", this version supports layout 3"
  end
end
