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
--- Kinds: f in flight {entry, message}, b pending behind it, p scheduled, s in no set, r ready, l waiting for its group, d dead letter, m dedup fact, c meta, e event id
--- (lib/dedup/events; the id includes its route).
--- @include "lib/now"
--- @include "lib/slot/slot"
--- @include "lib/validate/slot"
--- @include "lib/validate/stored"
--- @include "lib/dedup/events"
--- @include "lib/slot/message"
--- @include "lib/slot/inflight"
--- @include "lib/schedule/schedule"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
elseif closed ~= ARGV[2] then
  return { "open", now_ms }
end

local function group_flag(group, key)
  local keys = group ~= "" and redis.call("HGET", K.group_active, group)
  for _, one in ipairs(keys and unpack_table(keys) or {}) do
    if one == key then
      return "1"
    end
  end
  return ""
end

local entries, bytes
local function add(kind, name, number, value, within, route)
  entries[#entries + 1] = { kind, name, number, value, within, route }
  bytes = bytes + #name + #value
end
local function add_message(kind, key, number, hash)
  local packed = redis.call("HGET", hash, key)
  local m = validate_message(packed)
  if not m then
    problem = problem or corrupt_entry(hash, key)
    return
  end
  add(kind, key, number, packed, group_flag(m.group, key), m.group ~= "" and m.group or key)
end
local function add_flight(key, ends)
  local entry, packed = redis.call("HGET", K.inflight, key), redis.call("HGET", K.messages, key)
  local whole, m = entry and parse_entry(entry), validate_message(packed)
  if not whole or not m then
    problem = problem or corrupt_entry(whole and K.messages or K.inflight, key)
    return
  end
  add("f", key, ends, cmsgpack.pack({ entry, packed }), group_flag(m.group, key), m.group ~= "" and m.group or key)
  if redis.call("HEXISTS", K.next, key) == 1 then
    add_message("b", key, "0", K.next)
  end
end
local function add_letter(id, died)
  local packed = redis.call("HGET", K.dead_data, id)
  local letter = unpack_table(packed)
  local m = letter and validate_message(letter[2])
  if not m then
    problem = problem or corrupt_entry(K.dead_data, id)
    return
  end
  local group = m.group
  add("d", id, died, packed, "", group ~= "" and group or letter[1])
end
local function add_pending(key, due)
  add_message("p", key, due, K.messages)
end
local function add_ready(member, rank)
  local _, key = parse_ready(member)
  add_message("r", key, rank, K.messages)
end
local function add_lined(member)
  local key = string.match(member, "^[^%z]*%z[^%z]*%z" .. string.rep("%d", 30) .. "(.*)$")
  if not key then
    problem = problem or K.group_waiting .. " holds a corrupt member " .. member
    return
  end
  add_message("l", key, "0", K.messages)
end
local function add_memo(name, expires)
  local value = redis.call("HGET", K.dedup, name) or ""
  local kind, group = string.sub(name, 1, 1), value
  if kind == "v" then
    group = string.match(value, "^[^ ]+ (.*)$") or ""
  end
  add("m", name, expires, value, "", group ~= "" and group or string.sub(name, 2))
end

-- Add the last buckets of the event table, always whole ones. `shown_from` is the first bucket of the batch.
local seen, shown_from = load_events(K), 0
local function add_events()
  shown_from = seen.buckets
  while shown_from > 0 and check_bucket(seen, shown_from - 1)
    and (#entries == 0 or #entries + #seen.held[shown_from - 1] / seen.width <= 500) do
    shown_from = shown_from - 1
    local held = seen.held[shown_from]
    for at = 1, #held, seen.width do
      add("e", string.sub(held, at, at + 17), expires_at(held, at), "", "", "")
    end
  end
  problem = problem or seen.problem
end
local function delete_events()
  for at = shown_from, seen.buckets - 1 do
    redis.call("HDEL", K.dedup, "e" .. at)
  end
  redis.call("HSET", K.dedup, "e", cmsgpack.pack({ 1, math.max(1, shown_from), seen.count }))
  seen = load_events(K)
end

-- Add messages that are in no set. There should be none.
local function add_left()
  for kind, hash in pairs({ s = K.messages, b = K.next }) do
    local left = #entries == 0 and redis.call("HKEYS", hash) or {}
    table.sort(left)
    for i = 1, math.min(#left, 500) do
      add_message(kind, left[i], "0", hash)
    end
  end
end
local mine = { v = true, batch = true, opened = true, flushed = true, large = true }
local function add_facts()
  local found = redis.call("HGETALL", K.meta)
  for i = 1, #found, 2 do
    if not mine[found[i]] then
      add("c", found[i], "0", found[i + 1], "", "")
    end
  end
end

-- Read the next batch. It stays the same until it is deleted, because nothing else changes a closed slot.
local function read_batch()
  entries, bytes = {}, 0
  -- Waiting members come first: loading may move the active members before them (reshard/load), and then these go on.
  local parts = { "group_waiting", "leases", "scheduled", "ready", "dead", "dedup_expiry" }
  for n, add_one in ipairs({ add_lined, add_flight, add_pending, add_ready, add_letter, add_memo }) do
    local part = parts[n]
    local found = redis.call("ZRANGE", K[part], 0, 499, "WITHSCORES")
    for i = 1, #found, 2 do
      if bytes < max_call_bytes then
        add_one(found[i], found[i + 1])
      end
    end
    if #entries > 0 then
      return entries
    end
  end
  for _, add_all in ipairs({ add_events, add_left, add_facts }) do
    if #entries == 0 then
      add_all()
    end
  end
  return entries
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
local function delete_batch(all)
  if all[1] and all[1][1] == "e" then
    return delete_events()
  end
  for _, e in ipairs(all) do
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

problem = nil
-- Run the commands of the last batch now: an ACL denial must abort the script before its first write.
redis.call("HKEYS", K.meta)
redis.call("HGETALL", K.meta)
redis.call("HDEL", K.meta, "")
local last = tonumber(redis.call("HGET", K.meta, "batch")) or 0
local first = read_batch()
if not problem and tonumber(ARGV[3]) == last + 1 then
  delete_batch(first)
  first = read_batch()
  last = last + 1
  redis.call("HSET", K.meta, "batch", last)
end
local reply = { "ok", now_ms, last + 1 }
if problem then
  return { "foreign", now_ms, problem }
end
for _, e in ipairs(first) do
  for i = 1, 6 do
    reply[#reply + 1] = e[i]
  end
end
if #reply == 3 then
  redis.call("UNLINK", K.group_active, K.dedup, K.replies[0])
  redis.call("UNLINK", K.replies[1])
end
return reply
