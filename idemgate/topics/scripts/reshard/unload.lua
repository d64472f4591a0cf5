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
--- Keys: hash
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/slot/message"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/schedule/parse_ready"
--- @include "topics/lib/slot/inflight"
--- @include "topics/lib/slot/read_entries"
--- @include "topics/lib/slot/lease_times"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/events"
-- The next batch of entries of a closed slot (topics/reshard/unload).
local function add_entry(batch, kind, name, number, value, within, route)
  batch.entries[#batch.entries + 1] = { kind, name, number, value, within, route }
  batch.bytes = batch.bytes + #name + #value
end

local function group_flag(K, group, key)
  local keys = group ~= "" and redis.call("HGET", K.group_active, group)
  for _, one in ipairs(keys and unpack_table(keys) or {}) do
    if one == key then
      return "1"
    end
  end
  return ""
end

local function add_message(K, batch, kind, key, number, hash)
  local packed = redis.call("HGET", hash, key)
  local m = validate_message(packed)
  if not m then
    batch.problem = batch.problem or corrupt_entry(hash, key)
    return
  end
  add_entry(batch, kind, key, number, packed, group_flag(K, m.group, key), m.group ~= "" and m.group or key)
end

local function add_waiting(K, batch, member)
  local key = string.match(member, "^[^%z]*%z[^%z]*%z" .. string.rep("%d", 30) .. "(.*)$")
  if not key then
    batch.problem = batch.problem or K.group_waiting .. " holds a corrupt member " .. member
    return
  end
  add_message(K, batch, "l", key, "0", K.messages)
end

local function add_flight(K, batch, key, start)
  local entry, packed = read_entries(K, { key })[key], redis.call("HGET", K.messages, key)
  local whole, m = entry and parse_entry(entry), validate_message(packed)
  if not whole or not m then
    batch.problem = batch.problem or corrupt_entry(whole and K.messages or K.inflight, key)
    return
  end
  local value, route = cmsgpack.pack({ entry, packed }), m.group ~= "" and m.group or key
  add_entry(batch, "f", key, digits(lease_end(K, start)), value, group_flag(K, m.group, key), route)
  if redis.call("HEXISTS", K.next, key) == 1 then
    add_message(K, batch, "b", key, "0", K.next)
  end
end

local function add_due_message(K, batch, key, due)
  add_message(K, batch, "p", key, due, K.messages)
end

local function add_ready(K, batch, member, rank)
  local _, key = parse_ready(member)
  add_message(K, batch, "r", key, rank, K.messages)
end

local function add_letter(K, batch, id, died)
  local packed = redis.call("HGET", K.dead_data, id)
  local letter = unpack_table(packed)
  local m = letter and validate_message(letter[2])
  if not m then
    batch.problem = batch.problem or corrupt_entry(K.dead_data, id)
    return
  end
  add_entry(batch, "d", id, died, packed, "", m.group ~= "" and m.group or letter[1])
end

local function add_memo(K, batch, name, expires)
  local value = redis.call("HGET", K.dedup, name) or ""
  local kind, group = string.sub(name, 1, 1), value
  if kind == "v" then
    group = string.match(value, "^[^ ]+ (.*)$") or ""
  end
  add_entry(batch, "m", name, expires, value, "", group ~= "" and group or string.sub(name, 2))
end

-- Add the last buckets of the event table, always whole ones. `batch.from` is the first of them.
local function add_events(K, batch)
  local seen = load_events(K)
  batch.events, batch.from = seen, seen.buckets
  while batch.from > 0 and check_bucket(seen, batch.from - 1)
    and (#batch.entries == 0 or #batch.entries + #seen.held[batch.from - 1] / seen.width <= 500) do
    batch.from = batch.from - 1
    local held = seen.held[batch.from]
    for at = 1, #held, seen.width do
      add_entry(batch, "e", string.sub(held, at, at + 17), expires_at(held, at), "", "", "")
    end
  end
  batch.problem = batch.problem or seen.problem
end

-- Add messages that are in no set. There should be none.
local function add_left(K, batch)
  for kind, hash in pairs({ s = K.messages, b = K.next }) do
    local left = #batch.entries == 0 and redis.call("HKEYS", hash) or {}
    table.sort(left)
    for i = 1, math.min(#left, 500) do
      add_message(K, batch, kind, left[i], "0", hash)
    end
  end
end

local mine = { v = true, batch = true, opened = true, flushed = true, large = true, term = true }
local function add_facts(K, batch)
  local found = redis.call("HGETALL", K.meta)
  for i = 1, #found, 2 do
    if not mine[found[i]] then
      add_entry(batch, "c", found[i], "0", found[i + 1], "", "")
    end
  end
end

-- Return the next batch: `entries`, and `problem` if it is corrupt. It stays the same until it is deleted, because
-- nothing else changes a closed slot.
local function next_entries(K)
  local batch = { entries = {}, bytes = 0 }
  -- Waiting members come first: loading may move the active members before them (topics/reshard/load), and then these go on.
  local parts = { "group_waiting", "leases", "scheduled", "ready", "dead", "dedup_expiry" }
  for n, add_one in ipairs({ add_waiting, add_flight, add_due_message, add_ready, add_letter, add_memo }) do
    local part = parts[n]
    local found = redis.call("ZRANGE", K[part], 0, 499, "WITHSCORES")
    for i = 1, #found, 2 do
      if batch.bytes < max_call_bytes then
        add_one(K, batch, found[i], found[i + 1])
      end
    end
    if #batch.entries > 0 then
      return batch
    end
  end
  for _, add_all in ipairs({ add_events, add_left, add_facts }) do
    if #batch.entries == 0 then
      add_all(K, batch)
    end
  end
  return batch
end

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
