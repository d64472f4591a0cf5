--- Unload a closed slot batch by batch. A call deletes the batch that was loaded elsewhere and returns the next one,
--- which stays until it is confirmed in turn. A batch has at most 500 entries of one kind, and ends with the entry
--- that fills 128 KiB.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- ARGV[3] number of the batch that was loaded, 0 = read only
--- Returns {"ok", now ms, number of this batch, then six an entry: kind, name, number, value, "1" if active in its group or "",
---         route: what decides its slot, or ""} (no entry: the slot is empty)
---         {"open", now ms} (another change closed or reopened it) {"foreign", now ms, problem}
--- Kinds: f in flight {entry, message}, b pending behind it, p scheduled, s in no set, r ready, l waiting for its group,
---        d dead letter, m dedup fact, c meta, e event id (topics/lib/events; the id includes its route).
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/slot/message"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/next_entries"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
elseif closed ~= ARGV[2] then
  return { "open", now_ms }
end

local in_zset = { f = "leases", p = "scheduled", r = "ready", l = "group_waiting", d = "dead", m = "dedup_expiry" }
local in_hash = { f = "inflight", b = "next", d = "dead_data", m = "dedup", c = "meta" }

-- Return the member of an entry in its sorted set.
local function set_member(kind, name, value)
  if kind ~= "r" and kind ~= "l" then
    return name
  end
  local m = decode_message(value)
  return kind == "r" and ready_member(name, m) or waiting_member(name, m)
end

local function delete_events(events, from)
  for at = from, events.buckets - 1 do
    redis.call("HDEL", K.dedup, "e" .. at)
  end
  redis.call("HSET", K.dedup, "e", cmsgpack.pack({ 1, math.max(1, from), events.count }))
end

local function delete_batch(batch)
  if batch.entries[1] and batch.entries[1][1] == "e" then
    return delete_events(batch.events, batch.from)
  end
  for _, e in ipairs(batch.entries) do
    local zset, hash = in_zset[e[1]], in_hash[e[1]] or "messages"
    if zset then
      redis.call("ZREM", K[zset], set_member(e[1], e[2], e[4]))
    end
    redis.call("HDEL", K[hash], e[2])
    if hash == "inflight" then
      redis.call("HDEL", K.messages, e[2])
    end
  end
end

-- Run the commands of the last batch now: an ACL denial must abort the script before its first write.
redis.call("HKEYS", K.meta)
redis.call("HGETALL", K.meta)
redis.call("HDEL", K.meta, "")
local last = tonumber(redis.call("HGET", K.meta, "batch")) or 0
local batch = next_entries(K)
if not batch.problem and tonumber(ARGV[3]) == last + 1 then
  delete_batch(batch)
  batch, last = next_entries(K), last + 1
  redis.call("HSET", K.meta, "batch", last)
end
if batch.problem then
  return { "foreign", now_ms, batch.problem }
end
local reply = { "ok", now_ms, last + 1 }
for _, e in ipairs(batch.entries) do
  for i = 1, 6 do
    reply[#reply + 1] = e[i]
  end
end
if #reply == 3 then
  redis.call("UNLINK", K.group_active, K.dedup, K.replies[0])
  redis.call("UNLINK", K.replies[1])
end
return reply
