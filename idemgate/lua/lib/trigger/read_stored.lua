-- Read the messages behind deliveries in flight into `stored`, by index. Return the set of keys in flight.
local function read_behind(K, names, stored)
  local in_flight, behind, at = {}, {}, {}
  for i, entry in ipairs(redis.call("HMGET", K.inflight, unpack(names))) do
    if entry then
      in_flight[names[i]], stored[i] = true, false
      behind[#behind + 1], at[#at + 1] = names[i], i
    end
  end
  for n, packed in ipairs(#behind > 0 and redis.call("HMGET", K.next, unpack(behind)) or {}) do
    stored[at[n]] = packed
  end
  return in_flight
end

-- Return the packed pending messages of these keys, by index, and the set of keys in flight. The pending message of a key in
-- flight is the one behind its delivery.
local function read_stored(K, names)
  local stored = redis.call("HMGET", K.messages, unpack(names))
  return stored, redis.call("HLEN", K.inflight) > 0 and read_behind(K, names, stored) or {}
end
