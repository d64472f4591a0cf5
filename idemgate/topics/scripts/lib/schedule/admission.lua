--- Makes a part of the reply.
--- @include "topics/lib/slot/message"
--- @include "topics/lib/slot/budget"
--- @include "lib/problems"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/schedule/rank"
local most_ordered = 128 -- messages of a batch -- fault: most-ordered

-- Append the rest of the messages that are due at the same time as the last one of a batch. The schedule orders these by
-- their keys, so the first of a group may be anywhere. If there are too many, set `batch.crowded_due` to that time.
local function complete_last_time(K, p, batch)
  local due, same = batch.dues[batch.n], 0
  while batch.dues[batch.n - same] == due do
    same = same + 1
  end
  local missing = redis.call("ZCOUNT", K.scheduled, digits(due), digits(due)) - same
  local room = math.max(0, math.min(missing, most_ordered - batch.n))
  local keys, n = redis.call("ZRANGEBYSCORE", K.scheduled, digits(due), digits(due), "LIMIT", same, room), nil
  n, batch.bytes = count_within_budget(K, p, keys, batch.bytes, "messages")
  if n < missing then
    batch.crowded_due = due
  end
  for i, packed in ipairs(n > 0 and redis.call("HMGET", K.messages, unpack(keys, 1, n)) or {}) do
    local at = batch.n + 1
    batch.n, batch.keys[at], batch.dues[at], batch.members[at], batch.messages[at] = at, keys[i], due, keys[i], packed
  end
end

-- Order the messages of a batch from `first` on: those of one time by the serial of their newest trigger.
local function order_by_acceptance(batch, first)
  local order, ordered = {}, { keys = {}, dues = {}, members = {}, messages = {} }
  for i = first, batch.n do
    local packed = batch.messages[i]
    local serial = read_header(packed) and select(7, struct.unpack(HEADER, packed)) or math.huge
    order[#order + 1] = { due = batch.dues[i], serial = serial, i = i }
  end
  table.sort(order, function(a, b)
    if a.due ~= b.due then
      return a.due < b.due
    end
    return a.serial < b.serial or a.serial == b.serial and a.i < b.i
  end)
  for part, values in pairs(ordered) do
    for i = 1, batch.n do
      values[i] = batch[part][i < first and i or order[i - first + 1].i]
    end
    batch[part] = values
  end
end

-- Return the group of a message with an extension, or nil if it is corrupt. It decodes no more than that.
local function group_of(packed)
  local size = #packed >= HEADER_SIZE + 4 and struct.unpack(">I4", packed, HEADER_SIZE + 1)
  local values = size and unpack_table(string.sub(packed, HEADER_SIZE + 5, HEADER_SIZE + 4 + size))
  return values and type(values[5]) == "string" and values[5] or nil
end

-- Return the active keys of a group as the keys of a table, and their number. Return nil if they are corrupt.
local function active_keys(K, group)
  local packed, found = redis.call("HGET", K.group_active, group), {}
  local inside = packed and unpack_table(packed) or not packed and {}
  for _, key in ipairs(inside or {}) do
    found[key] = true
  end
  return inside and found, inside and #inside
end

-- Add a message to those of the batch that wait for their groups, which are full.
local function add_waiting(p, batch, key, due, m)
  if due ~= m.due then
    m.due, m.why = due, reason.flush
  end
  -- Most ranks are negative. The offset and 16 digits sort correctly up to the highest priority.
  local rank = p.ranked and string.format("%016.0f", rank_of(p, m) + 4503599627370496) or ""
  m.rank = rank .. string.format("%015.0f", m.serial)
  local waiting, members = batch.waiting, batch.waiting_members
  waiting[#waiting + 1], waiting[#waiting + 2] = key, encode_message(m)
  members[#members + 1], members[#members + 2] = 0, waiting_member(key, m)
end

-- Return a function that lets the i-th message of a batch, which has an extension, enter its group. It returns the group
-- ("" for none), and whether to deliver the message now: it waits if the group is full. It returns nil and the problem of
-- a message that is corrupt. At the first message with a group it orders the rest of the batch, and returns nil, nil and
-- true: then another message may be the i-th. The ready set is in order (`ranked`). It does the same, sets `batch.crowded`
-- and ends the batch if a message that is not read yet may precede the i-th one in its group.
local function new_admission(K, p, ranked, checked)
  local full = {} -- group -> its active keys; no delivery ends within a take
  local unranked_from = ranked and tonumber(redis.call("ZRANGE", K.scheduled, "0", "0", "WITHSCORES")[2]) or math.huge

  local function begin_groups(batch, i)
    batch.waiting, batch.waiting_members = {}, {}
    if ranked then
      return
    end
    batch.dues = redis.call("ZMSCORE", K.scheduled, unpack(batch.keys))
    for n, due in ipairs(batch.dues) do
      batch.dues[n] = tonumber(due)
    end
    if batch.full then
      complete_last_time(K, p, batch)
    end
    order_by_acceptance(batch, i)
  end

  return function(batch, i)
    local key, group, due = batch.keys[i], group_of(batch.messages[i]), batch.dues[i]
    if group == "" then
      return "", true
    end
    local m = group and validate_message(batch.messages[i])
    if not m then
      return nil, corrupt_entry(K.messages, key)
    elseif not batch.waiting then
      begin_groups(batch, i)
      return nil, nil, true
    end
    local active, n = full[m.group], p.group_limit
    local problem = not checked and validate_slot(K)
    checked = true
    if not problem and not active then
      active, n = active_keys(K, m.group)
      problem = not active and corrupt_entry(K.group_active, m.group)
    end
    if problem then
      return nil, problem
    elseif not active[key] and n >= p.group_limit then -- fault: group-full
      full[m.group] = active
      add_waiting(p, batch, key, due, m)
      return m.group, false
    elseif due == batch.crowded_due or unranked_from <= due then
      batch.n, batch.crowded = i - 1, true
      return nil, nil, true
    end
    group_enter(K, m.group, key)
    return m.group, true
  end
end
