--- Hand over what a closed slot holds, a batch at a time: forget the batch that was taken in elsewhere, and show the next one, which
--- stays until it is named in turn. A batch is at most 500 entries of one kind, and ends with the entry that makes it 128 KiB.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- ARGV[3] number of the batch that was taken in, 0 = show only
--- Returns {"ok", now ms, number of this batch, then six an entry: kind, name, number, value, "1" if it is inside of its group or "",
---         what decides its slot or ""} (no entry: it is empty)
---         {"open", now ms} (another change closed or opened it) {"foreign", now ms, problem}
--- Kinds: f flight, b pending behind it, p scheduled, r ready, l in the line of its group, d dead letter, m memo, c facts, e an event id
--- (lib/events; it says itself what decides its slot).
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/events"
--- @include "lib/message"
--- @include "lib/delivery"
--- @include "lib/sortable"
--- @include "lib/lined"
--- @include "lib/most_bytes"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = wrong(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
elseif closed ~= ARGV[2] then
  return { "open", now_ms }
end

local function inside(group, key)
  local keys = group ~= "" and redis.call("HGET", K.busy, group)
  for _, one in ipairs(keys and unpacked(keys) or {}) do
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
local function add_message(kind, key, number, packed)
  local m = sound_message(packed)
  if not m then
    problem = problem or unsound(K.pending, key)
    return
  end
  local group = m[message.group]
  add(kind, key, number, packed, inside(group, key), group ~= "" and group or key)
end
local function add_flight(key, ends)
  local packed = redis.call("HGET", K.flight, key)
  local d = sound_delivery(packed)
  local m = d and sound_message(d[delivery.message])
  if not m then
    problem = problem or unsound(K.flight, key)
    return
  end
  local group = m[message.group]
  add("f", key, ends, packed, inside(group, key), group ~= "" and group or key)
  local behind = redis.call("HGET", K.pending, key)
  if behind then
    add_message("b", key, "0", behind)
  end
end
local function add_letter(id, died)
  local packed = redis.call("HGET", K.grave, id)
  local letter = unpacked(packed)
  local m = letter and sound_message(letter[2])
  if not m then
    problem = problem or unsound(K.grave, id)
    return
  end
  local group = m[message.group]
  add("d", id, died, packed, "", group ~= "" and group or letter[1])
end
local function add_pending(key, due)
  add_message("p", key, due, redis.call("HGET", K.pending, key))
end
local function add_ready(member, rank)
  local key = string.sub(member, 16)
  add_message("r", key, rank, redis.call("HGET", K.pending, key))
end
local function add_lined(member)
  local key = string.match(member, "^[^%z]*%z[^%z]*%z%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d(.*)$")
  if not key then
    problem = problem or K.line .. " has as " .. member .. " what idemgate has not written"
    return
  end
  add_message("l", key, "0", redis.call("HGET", K.pending, key))
end
local function add_memo(name, expires)
  local value = redis.call("HGET", K.memo, name) or ""
  local kind, group = string.sub(name, 1, 1), value
  if kind == "v" then
    group = string.match(value, "^[^ ]+ (.*)$") or ""
  end
  add("m", name, expires, value, "", group ~= "" and group or string.sub(name, 2))
end

-- The last buckets of the events that are remembered, whole, and from which one on they are shown.
local seen, shown_from = events(K), 0
local function add_events()
  shown_from = seen.buckets
  while shown_from > 0 and readable(seen, shown_from - 1)
    and (#entries == 0 or #entries + #seen.held[shown_from - 1] / seen.width <= 500) do
    shown_from = shown_from - 1
    local held = seen.held[shown_from]
    for at = 1, #held, seen.width do
      add("e", string.sub(held, at, at + 17), forgotten_at(held, at), "", "", "")
    end
  end
  problem = problem or seen.problem
end
local function forget_events()
  for at = shown_from, seen.buckets - 1 do
    redis.call("HDEL", K.memo, "e" .. at)
  end
  redis.call("HSET", K.memo, "e", cmsgpack.pack({ 1, math.max(1, shown_from), seen.count }))
  seen = events(K)
end

-- What pending messages are left when nothing stands anywhere: there should be none.
local function add_left()
  local left = redis.call("HKEYS", K.pending)
  table.sort(left)
  for i = 1, math.min(#left, 500) do
    add_message("b", left[i], "0", redis.call("HGET", K.pending, left[i]))
  end
end
local mine = { v = true, batch = true, opened = true, flushed = true, large = true }
local function add_facts()
  local found = redis.call("HGETALL", K.facts)
  for i = 1, #found, 2 do
    if not mine[found[i]] then
      add("c", found[i], "0", found[i + 1], "", "")
    end
  end
end

-- The next batch: the same until it is forgotten, since nothing else changes a closed slot.
local function batch()
  entries, bytes = {}, 0
  -- The lines come first: what stands before them may lose its place where it is taken in (topics/load), and they go on.
  local parts = { "line", "lease", "due", "ready", "dead", "fade" }
  for n, add_one in ipairs({ add_lined, add_flight, add_pending, add_ready, add_letter, add_memo }) do
    local part = parts[n]
    local found = redis.call("ZRANGE", K[part], 0, 499, "WITHSCORES")
    for i = 1, #found, 2 do
      if bytes < most_bytes then
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

local in_zset = { f = "lease", p = "due", r = "ready", l = "line", d = "dead", m = "fade" }
local in_hash = { f = "flight", d = "grave", m = "memo", c = "facts" }

-- How an entry is called in its sorted set.
local function member_of(kind, name, value)
  if kind ~= "r" and kind ~= "l" then
    return name
  end
  local m = cmsgpack.unpack(value)
  return kind == "r" and sortable(m[message.due], name) or lined(name, m)
end
local function forget(all)
  if all[1] and all[1][1] == "e" then
    return forget_events()
  end
  for _, e in ipairs(all) do
    local zset, hash = in_zset[e[1]], in_hash[e[1]] or "pending"
    if zset then
      redis.call("ZREM", K[zset], member_of(e[1], e[2], e[4]))
    end
    redis.call("HDEL", K[hash], e[2])
  end
end

problem = nil
-- What is asked once little is left is asked here, too: whoever may not ask it is refused while all is whole.
redis.call("HKEYS", K.facts)
redis.call("HGETALL", K.facts)
redis.call("HDEL", K.facts, "")
local last = tonumber(redis.call("HGET", K.facts, "batch")) or 0
local first = batch()
if not problem and tonumber(ARGV[3]) == last + 1 then
  forget(first)
  first = batch()
  last = last + 1
  redis.call("HSET", K.facts, "batch", last)
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
  redis.call("DEL", K.busy, K.memo, K.told[0])
  redis.call("DEL", K.told[1])
end
return reply
