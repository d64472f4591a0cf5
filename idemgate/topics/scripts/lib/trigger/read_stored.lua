--- Makes a part of the reply.
-- Complete `t.stored`, the packed pending messages of the keys, by index, and `t.in_flight`, the set of keys in
-- flight. The pending message of a key in flight is that of K.next.
local function read_stored(t)
  if t.in_flight then
    return
  end
  local K, args, last = t.K, t.args, 6 + t.n
  t.stored, t.in_flight = t.stored or redis.call("HMGET", K.messages, unpack(args, 7, last)), {}
  if redis.call("ZCARD", K.leases) == 0 then
    return
  end
  local keys, places = {}, {}
  for i, start in ipairs(redis.call("ZMSCORE", K.leases, unpack(args, 7, last))) do
    if start then
      t.in_flight[args[6 + i]], t.stored[i] = true, false
      keys[#keys + 1], places[#places + 1] = args[6 + i], i
    end
  end
  for i, packed in ipairs(#keys > 0 and redis.call("HMGET", K.next, unpack(keys)) or {}) do
    t.stored[places[i]] = packed
  end
end
