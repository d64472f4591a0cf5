--- Keys: hash
--- @include "topics/lib/slot/message"
--- @include "topics/lib/slot/inflight"
--- @include "topics/lib/slot/read_entries"
--- @include "lib/problems"
-- Validators of stored data. They run before the first write: a script that fails midway has done half of its work.
-- They return nil, or a text that names the key, for corrupt and for missing data.
local function are_numbers(found, places)
  for _, place in ipairs(places) do
    if type(found[place]) ~= "number" then
      return false
    end
  end
  return true
end
local function unpack_table(packed)
  local whole, found = pcall(cmsgpack.unpack, packed)
  return whole and type(found) == "table" and found or nil
end
-- Return true if an accumulator has the shape of this merge policy (topics/lib/payloads).
local function is_accumulator(spec, acc)
  local op = spec.op
  if op == "last" or op == "first" then
    return true
  elseif type(acc) ~= "table" then
    return false
  elseif op == "fields" then
    for field, part in pairs(acc) do
      if field == "\255" and type(part) ~= "number" or field ~= "\255" and not is_accumulator(spec.fields[field] or spec.rest, part) then
        return false
      end
    end
    return true
  elseif op == "append" then
    return are_numbers(acc, { 1, 2 }) and type(acc[3]) == "string"
  elseif op == "union" then
    return are_numbers(acc, { 1 }) and type(acc[2]) == "table"
  elseif op == "count" or op == "sum" then
    return are_numbers(acc, { 1, 2 })
  elseif op == "min" or op == "max" then
    return are_numbers(acc, { 1 })
  end
  error("no merge policy " .. tostring(op))
end
local function are_traces(found)
  if type(found) ~= "table" or type(found[1]) ~= "number" then
    return false
  end
  for i = 2, #found do
    if type(found[i]) ~= "string" then
      return false
    end
  end
  return true
end
local function has_texts(m)
  return type(m.failure) == "string" and type(m.version) == "string" and type(m.group) == "string" and type(m.earlier) == "string"
    and type(m.attempts) == "number" and type(m.splits) == "number" and (m.priority == "" or type(m.priority) == "number")
    and (not m.rank or type(m.rank) == "string") and (not m.traces or are_traces(m.traces))
end
-- Return the decoded message, or nil if it is corrupt. With a `spec`, its accumulator must have that shape.
local function validate_message(packed, spec)
  if type(packed) ~= "string" or not read_header(packed) then
    return nil
  end
  local whole, m = pcall(decode_message, packed)
  if not whole or not has_texts(m) then
    return nil
  end
  if spec and spec.op ~= "last" and spec.op ~= "first" then
    m.acc = unpack_table(m.acc)
    return m.acc and is_accumulator(spec, m.acc) and m or nil
  end
  return m
end
-- Return a problem with a group, or with its first `limit` waiting members, or nil.
local function validate_group(K, group, limit)
  local inside = group ~= "" and redis.call("HGET", K.group_active, group)
  if inside and not unpack_table(inside) then
    return corrupt_entry(K.group_active, group)
  end
  if group ~= "" and limit then
    local line = redis.call("ZRANGEBYLEX", K.group_waiting, "[" .. group .. "\0", "(" .. group .. "\1", "LIMIT", 0, limit)
    for _, member in ipairs(line) do
      if not string.find(member, "^[^%z]*%z" .. string.rep("%d", 30), #group + 2) then
        return K.group_waiting .. " holds a corrupt member in group " .. group
      end
    end
  end
end
-- Return a problem with the stored data of these keys, or nil: messages, deliveries (`entries`, if known), groups.
local function validate_keys(K, p, keys, entries)
  for _, key in ipairs(keys) do
    local groups = {}
    for _, hash in ipairs({ K.messages, K.next }) do
      local stored = redis.call("HGET", hash, key)
      local m = stored and validate_message(stored, p and p.merge)
      if stored and not m then
        return corrupt_entry(hash, key)
      end
      groups[#groups + 1] = m and m.group or nil
    end
    local entry = (entries or read_entries(K, { key }))[key]
    if entry and not parse_entry(entry) then
      return corrupt_entry(K.inflight, key)
    elseif entry and redis.call("HEXISTS", K.messages, key) == 0 then
      return missing_entry(K.leases, key)
    end
    for _, group in ipairs(groups) do
      local problem = validate_group(K, group, p and p.group_limit)
      if problem then
        return problem
      end
    end
  end
end
