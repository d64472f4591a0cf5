--- Makes a part of the reply.
-- Complete `t.stored`, the packed pending messages of the keys, by index, and `t.in_flight`, the set of keys in
-- flight. The pending message of a key in flight is that of K.next.
local function read_stored(t)
  if t.in_flight then
    return
  end
  local K, names = t.K, t.names
  t.stored, t.in_flight = t.stored or redis.call("HMGET", K.messages, unpack(names, 1, t.n)), {}
  if redis.call("HLEN", K.inflight) == 0 then
    return
  end
  local keys, places = {}, {}
  for i, entry in ipairs(redis.call("HMGET", K.inflight, unpack(names, 1, t.n))) do
    if entry then
      t.in_flight[names[i]], t.stored[i] = true, false
      keys[#keys + 1], places[#places + 1] = names[i], i
    end
  end
  for i, packed in ipairs(#keys > 0 and redis.call("HMGET", K.next, unpack(keys)) or {}) do
    t.stored[places[i]] = packed
  end
end

-- Return the reply of a call: each code once, with the number of triggers in turn that have it.
local function reply_of(t, codes)
  local reply, last = { "ok", t.now_ms }, 2
  for i = 1, t.n do
    if last > 2 and codes[i] == reply[last - 1] then
      reply[last] = reply[last] + 1
    else
      reply[last + 1], reply[last + 2], last = codes[i], 1, last + 2
    end
  end
  return reply
end
