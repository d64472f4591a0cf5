--- Settle taken entries: remove them, delay their next delivery, or move them to the dead letters. A removal is
--- unconditional, because a handled entry must not run again. The other verbs need the state that the caller was given:
--- an entry that another consumer has taken is left to it. Idempotent. Each verb begins with a removal, so that it works
--- on a server without memory.
--- KEYS[1] leases
--- KEYS[2] state
--- KEYS[3] data
--- KEYS[4] dead letters
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] maximum number of dead letters; the oldest are dropped
--- ARGV[3..] four an entry: id; state; "done", "retry", "undo" (retry, and this delivery counts as none) or "dead";
---          delay in ms, or the dead letter
--- Returns {"ok", now ms, number of dead letters dropped, then "settled" | "lost" for each}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "subscribers/lib/validate_list_keys"
local K = { leases = KEYS[1], state = KEYS[2], data = KEYS[3], dead = KEYS[4] }
local now_ms, buried = math.floor(now(ARGV[1]) / 1000), false
local problem = validate_list_keys(K)
if problem then
  return { "foreign", now_ms, problem }
end

local function remove(id)
  redis.call("ZREM", K.leases, id)
  redis.call("HDEL", K.state, id)
  redis.call("HDEL", K.data, id)
end

local function settle(id, state, verb, value)
  if verb == "done" then
    remove(id)
    return "settled"
  elseif redis.call("HGET", K.state, id) ~= state then
    return "lost"
  end
  if verb == "dead" then
    remove(id)
    redis.call("RPUSH", K.dead, value)
    buried = true
  else
    local deliveries = tonumber(string.match(state, "^%d+")) - (verb == "undo" and 1 or 0)
    redis.call("ZREM", K.leases, id)
    redis.call("HSET", K.state, id, deliveries .. " ")
    redis.call("ZADD", K.leases, now_ms + value, id)
  end
  return "settled"
end

local reply = { "ok", now_ms, 0 }
for i = 3, #ARGV, 4 do
  reply[#reply + 1] = settle(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
end
-- After the maximum was lowered, each call drops some of the rest.
local dropped = buried and math.min(redis.call("LLEN", K.dead) - ARGV[2], 1000 + #ARGV) or 0
if dropped > 0 then
  redis.call("LTRIM", K.dead, dropped, -1)
  reply[3] = dropped
end
return reply
