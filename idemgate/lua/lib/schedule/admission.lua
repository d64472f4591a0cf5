--- @include "lib/slot/message"
--- @include "lib/slot/budget"
--- @include "lib/validate/problems"
--- @include "lib/validate/slot"
--- @include "lib/validate/stored"
--- @include "lib/schedule/schedule"
--- @include "lib/schedule/rank"
local most_ordered = 256 -- messages of a batch

-- Append the messages of the same due time that follow a batch to it, up to `most_ordered` in all. The sets order
-- messages of one time by their keys, so the first of a group may be among these.
local function complete_last_time(K, p, batch, ranked)
  local due, same = batch.dues[batch.n], 0
  while batch.dues[batch.n - same] == due do
    same = same + 1
  end
  local members, keys = {}, {}
  if ranked then
    for _, member in ipairs(redis.call("ZRANGE", K.ready, batch.n, most_ordered - 1)) do
      if tonumber(string.sub(member, 1, 15)) ~= due then
        break
      end
      members[#members + 1], keys[#keys + 1] = member, string.sub(member, 16)
    end
  else
    members = redis.call("ZRANGEBYSCORE", K.scheduled, digits(due), digits(due), "LIMIT", same, most_ordered - batch.n)
    keys = members
  end
  local n
  n, batch.bytes = count_within_budget(K, p, keys, batch.bytes, "messages")
  for i, packed in ipairs(n > 0 and redis.call("HMGET", K.messages, unpack(keys, 1, n)) or {}) do
    local at = batch.n + 1
    batch.n, batch.keys[at], batch.dues[at], batch.members[at], batch.messages[at] = at, keys[i], due, members[i], packed
  end
end

-- Order the messages of a batch from `first` on: those of one time and rank by the serial of their newest trigger.
local function order_by_acceptance(K, batch, first, ranked)
  local ranks = ranked and redis.call("ZMSCORE", K.ready, unpack(batch.members, 1, batch.n)) or batch.dues
  local order, turn, ordered = {}, 0, { keys = {}, dues = {}, members = {}, messages = {} }
  for i = first, batch.n do
    if i == first or batch.dues[i] ~= batch.dues[i - 1] or ranks[i] ~= ranks[i - 1] then
      turn = turn + 1
    end
    local packed = batch.messages[i]
    local serial = read_header(packed) and select(7, struct.unpack(HEADER, packed)) or math.huge
    order[#order + 1] = { turn = turn, serial = serial, i = i }
  end
  table.sort(order, function(a, b)
    if a.turn ~= b.turn then
      return a.turn < b.turn
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

-- Return the active keys of a group as the keys of a table.
local function active_keys(K, group)
  local found = {}
  for _, key in ipairs(cmsgpack.unpack(redis.call("HGET", K.group_active, group))) do
    found[key] = true
  end
  return found
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
-- a message that is corrupt. At the first message with a group it orders the rest of the batch instead, and returns nil,
-- nil and true: then another message may be the i-th.
local function new_admission(K, p, ranked, checked)
  local full = {} -- group -> its active keys; no delivery ends within a take
  return function(batch, i)
    local key, m = batch.keys[i], validate_message(batch.messages[i])
    if not m then
      return nil, corrupt_entry(K.messages, key)
    elseif m.group == "" then
      return "", true
    elseif not batch.ordered then
      batch.ordered, batch.waiting, batch.waiting_members = true, {}, {}
      if batch.full then
        complete_last_time(K, p, batch, ranked)
      end
      order_by_acceptance(K, batch, i, ranked)
      return nil, nil, true
    end
    local active = full[m.group]
    local problem = not checked and validate_slot(K) or not active and validate_group(K, m.group)
    checked = true
    if problem then
      return nil, problem
    elseif active and active[key] or not active and group_enter(K, m.group, key, p.group_limit) then
      return m.group, true
    end
    full[m.group] = active or active_keys(K, m.group)
    add_waiting(p, batch, key, batch.dues[i], m)
    return m.group, false
  end
end
