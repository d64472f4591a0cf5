--- Renew the leases of taken entries from now on (heartbeat). Idempotent.
--- KEYS[1] leases
--- KEYS[2] state
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] lease, ms
--- ARGV[3..] two an entry: id; state
--- Returns {"ok", now ms, then "renewed" | "lost" for each} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "subscribers/lib/validate_list_keys"
local K = { leases = KEYS[1], state = KEYS[2] }
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = validate_list_keys(K)
if problem then
  return { "foreign", now_ms, problem }
end

local function renew(id, state)
  if redis.call("HGET", K.state, id) ~= state then
    return "lost"
  end
  redis.call("ZREM", K.leases, id) -- a server without memory accepts a script that begins with a removal
  redis.call("ZADD", K.leases, now_ms + ARGV[2], id)
  return "renewed"
end

local reply = { "ok", now_ms }
for i = 3, #ARGV, 2 do
  reply[#reply + 1] = renew(ARGV[i], ARGV[i + 1])
end
return reply
