--- @include "lib/slot/message"
--- @include "lib/slot/delivery"
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
-- Return true if an accumulator has the shape of this merge policy (lib/merge/payloads).
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
  end
  return are_numbers(acc, op ~= "min" and op ~= "max" and { 1, 2 } or { 1 })
end
local function collect(last, ...)
  return last == -1 and { ... }
end
-- Every message passes through these, so they are as cheap as possible. A table created at once need not grow.
-- Comparing a field with a number raises an error for a wrong type, while every type() would cost a call. Unpack an
-- array of at most 15 values.
local function unpack_places(packed)
  local first = string.byte(packed)
  return first > 0x90 and first < 0xa0 and collect(cmsgpack.unpack_limit(packed, first - 0x90, 1))
end
local function check_message(m)
  local _ = m[message.count] < 0, m[message.first] < 0, m[message.last] < 0, m[message.due] < 0, m[message.attempts] < 0,
    m[message.serial] < 0, m[message.splits] < 0
  return type(m[message.group]) == "string" and m
end
local function unpack_message(packed)
  return check_message(unpack_places(packed))
end
local function check_delivery(d)
  local _ = d[delivery.fence] < 0, d[delivery.due] < 0, d[delivery.count] < 0
  return type(d[delivery.group]) == "string" and d
end
local function unpack_delivery(packed)
  local d = check_delivery(unpack_places(packed))
  return d and type(d[delivery.message]) == "string" and d
end
local function validate_message(packed, spec)
  local whole, m = pcall(unpack_message, packed)
  return whole and m and (not spec or is_accumulator(spec, m[message.acc])) and m or nil
end
local function validate_delivery(packed)
  local whole, d = pcall(unpack_delivery, packed)
  return whole and d or nil
end
local function corrupt_entry(target, name)
  return target .. " holds corrupt data under " .. name
end
-- Return the problem of a sorted set's member for which no data is stored.
local function missing_entry(target, member)
  return target .. " lists " .. member .. ", which has no stored data"
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
      if not string.find(member, "^[^%z]*%z%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d", #group + 2) then
        return K.group_waiting .. " holds a corrupt member in group " .. group
      end
    end
  end
end
-- Return a problem with the stored data of these keys, or nil: pending messages, deliveries, groups.
local function validate_keys(K, p, keys)
  for _, key in ipairs(keys) do
    local stored, groups = redis.call("HGET", K.pending, key), {}
    if stored then
      local m = validate_message(stored, p and p.merge)
      if not m then
        return corrupt_entry(K.pending, key)
      end
      groups[1] = m[message.group]
    end
    stored = redis.call("HGET", K.inflight, key)
    if stored then
      local d = validate_delivery(stored)
      if not d or not validate_message(d[delivery.message], p and p.merge) then
        return corrupt_entry(K.inflight, key)
      end
      groups[#groups + 1] = d[delivery.group]
    end
    for _, group in ipairs(groups) do
      local problem = validate_group(K, group, p and p.group_limit)
      if problem then
        return problem
      end
    end
  end
end
