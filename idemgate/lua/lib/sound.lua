--- @include "lib/message"
--- @include "lib/delivery"
-- Looks at what is stored before anything is written: a script that fails in the middle has done half of its work.
-- What is not as we write it is nil here, or a text that names the key it stands in; what is missing is not sound either.
local function numbers(found, places)
  for _, place in ipairs(places) do
    if type(found[place]) ~= "number" then
      return false
    end
  end
  return true
end
local function unpacked(packed)
  local whole, found = pcall(cmsgpack.unpack, packed)
  return whole and type(found) == "table" and found or nil
end
-- Whether an accumulator is one of this merge policy (lib/merge).
local function mergeable(spec, acc)
  local op = spec.op
  if op == "last" or op == "first" then
    return true
  elseif type(acc) ~= "table" then
    return false
  elseif op == "fields" then
    for field, part in pairs(acc) do
      if field == "\255" and type(part) ~= "number" or field ~= "\255" and not mergeable(spec.fields[field] or spec.rest, part) then
        return false
      end
    end
    return true
  elseif op == "append" then
    return numbers(acc, { 1, 2 }) and type(acc[3]) == "string"
  elseif op == "union" then
    return numbers(acc, { 1 }) and type(acc[2]) == "table"
  end
  return numbers(acc, op ~= "min" and op ~= "max" and { 1, 2 } or { 1 })
end
local function collected(last, ...)
  return last == -1 and { ... }
end
-- These look at every message that passes, as cheaply as can be: a table that is made at once need not grow, and what is not like a
-- message fails by itself where it is compared with a number, while each question after a type would cost a call.
-- An array of at most 15 places.
local function places(packed)
  local first = string.byte(packed)
  return first > 0x90 and first < 0xa0 and collected(cmsgpack.unpack_limit(packed, first - 0x90, 1))
end
local function is_message(m)
  local _ = m[message.count] < 0, m[message.first] < 0, m[message.last] < 0, m[message.due] < 0, m[message.attempts] < 0,
    m[message.serial] < 0, m[message.splits] < 0
  return type(m[message.group]) == "string" and m
end
local function message_of(packed)
  return is_message(places(packed))
end
local function is_delivery(d)
  local _ = d[delivery.fence] < 0, d[delivery.due] < 0, d[delivery.count] < 0
  return type(d[delivery.group]) == "string" and d
end
local function delivery_of(packed)
  local d = is_delivery(places(packed))
  return d and type(d[delivery.message]) == "string" and d
end
local function sound_message(packed, spec)
  local whole, m = pcall(message_of, packed)
  return whole and m and (not spec or mergeable(spec, m[message.acc])) and m or nil
end
local function sound_delivery(packed)
  local whole, d = pcall(delivery_of, packed)
  return whole and d or nil
end
local function unsound(target, name)
  return target .. " holds under " .. name .. " what idemgate has not written"
end
-- A place in a sorted set of which nothing is stored.
local function vacant(target, member)
  return target .. " names " .. member .. " of which nothing is stored"
end
-- What is wrong with a group, or with those first in its line, as many as there can be room for.
local function sound(K, group, limit)
  local inside = group ~= "" and redis.call("HGET", K.busy, group)
  if inside and not unpacked(inside) then
    return unsound(K.busy, group)
  end
  if group ~= "" and limit then
    local line = redis.call("ZRANGEBYLEX", K.line, "[" .. group .. "\0", "(" .. group .. "\1", "LIMIT", 0, limit)
    for _, member in ipairs(line) do
      if not string.find(member, "^[^%z]*%z%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d", #group + 2) then
        return K.line .. " has in the line of " .. group .. " what idemgate has not written"
      end
    end
  end
end
-- What is wrong with what is stored of these keys: their pending messages, their deliveries, their groups.
local function broken(K, p, keys)
  for _, key in ipairs(keys) do
    local stored, groups = redis.call("HGET", K.pending, key), {}
    if stored then
      local m = sound_message(stored, p and p.merge)
      if not m then
        return unsound(K.pending, key)
      end
      groups[1] = m[message.group]
    end
    stored = redis.call("HGET", K.flight, key)
    if stored then
      local d = sound_delivery(stored)
      if not d or not sound_message(d[delivery.message], p and p.merge) then
        return unsound(K.flight, key)
      end
      groups[#groups + 1] = d[delivery.group]
    end
    for _, group in ipairs(groups) do
      local problem = sound(K, group, p and p.group_limit)
      if problem then
        return problem
      end
    end
  end
end
