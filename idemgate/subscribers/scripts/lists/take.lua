--- Take entries of a list: those whose lease or delay has ended, then those that a blocking pop moved, then new ones.
--- An entry that this consumer still holds is returned with its old number of deliveries. So a late renewal costs no
--- attempt, and an entry whose reply was lost is delivered later. A call that is sent again takes other entries, which
--- get other ids.
--- KEYS[1] list
--- KEYS[2] incoming
--- KEYS[3] leases
--- KEYS[4] state
--- KEYS[5] data
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id; the ids of new entries consist of the time, this id and a number, so they sort by time
--- ARGV[3] consumer
--- ARGV[4] lease, ms
--- ARGV[5] maximum number of entries; a call takes 128 KiB of them or a single one
--- ARGV[6] "left" | "right", the end of the list from which it pops
--- Returns {"ok", now ms, end of the next lease or delay, ms (0 = none), entries removed because their data is missing,
---          three an entry: id; state; data} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "subscribers/lib/validate_list_keys"
local K = { source = KEYS[1], incoming = KEYS[2], leases = KEYS[3], state = KEYS[4], data = KEYS[5] }
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local consumer, lease_end, most = ARGV[3], now_ms + ARGV[4], tonumber(ARGV[5])
local problem = validate_list_keys(K)
if problem then
  return { "foreign", now_ms, problem }
end
local reply, taken, bytes, missing, number = { "ok", now_ms, 0, 0 }, 0, 0, 0, 0

local function has_room(data)
  return taken < most and (taken == 0 or bytes + #data <= max_call_bytes)
end

-- Each entry is removed from its place first. A server without memory accepts a script that begins with a removal. So
-- consumers can empty the list of such a server.
local function lease(id, state, data)
  redis.call("HSET", K.state, id, state)
  redis.call("ZADD", K.leases, lease_end, id)
  taken, bytes = taken + 1, bytes + #data
  reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = id, state, data
end

-- Return the state of a delivery. With the request id no other delivery has it, so a late copy of a settlement settles
-- no later delivery to the same consumer.
local function new_state(deliveries)
  return deliveries .. " " .. consumer .. " " .. ARGV[2]
end

-- A copy of this call, executed at another time, must not reuse an id: its data would replace that of the first entry.
-- HSETNX covers two calls at the same time.
local function lease_new(data)
  local id
  repeat
    id, number = string.format("%016.0f-%s-%04d", now_us, ARGV[2], number), number + 1
  until redis.call("HSETNX", K.data, id, data) == 1
  lease(id, new_state(1), data)
end

for _, id in ipairs(redis.call("ZRANGEBYSCORE", K.leases, "-inf", now_ms, "LIMIT", 0, most)) do
  local data = redis.call("HGET", K.data, id)
  if not data then
    redis.call("ZREM", K.leases, id)
    redis.call("HDEL", K.state, id)
    missing = missing + 1
  elseif has_room(data) then
    local state = redis.call("HGET", K.state, id) or ""
    local deliveries, owner = string.match(state, "^(%d+) (%S*)")
    redis.call("ZREM", K.leases, id)
    lease(id, owner == consumer and state or new_state(tonumber(deliveries or 0) + 1), data)
  end
end

local data = redis.call("LRANGE", K.incoming, 0, 0)[1]
while data and has_room(data) do
  redis.call("LPOP", K.incoming)
  lease_new(data)
  data = redis.call("LRANGE", K.incoming, 0, 0)[1]
end

local at = ARGV[6] == "left" and 0 or -1
data = not data and redis.call("LRANGE", K.source, at, at)[1]
while data and has_room(data) do
  if at == 0 then
    redis.call("LPOP", K.source)
  else
    redis.call("RPOP", K.source)
  end
  lease_new(data)
  data = redis.call("LRANGE", K.source, at, at)[1]
end

local next_lease = redis.call("ZRANGE", K.leases, 0, 0, "WITHSCORES")[2]
reply[3], reply[4] = tonumber(next_lease or 0), missing
return reply
