--- Return the stored results of a key. Writes nothing.
--- KEYS[1..15] slot
--- KEYS[16..17] results (topics/lib/slot/store_result)
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] key
--- ARGV[3] time for which the topic stores a result, ms
--- Returns {"ok", now ms, packed results of this period or "", packed results of the period before or ""}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/run_steps"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local function steps()
  local problem = check_layout(K, redis.call("HGET", K.meta, "v"))
  if problem then
    return { "foreign", now_ms, problem }
  end
  local period, reply = math.floor(now_ms / tonumber(ARGV[3])), { "ok", now_ms }
  K.results = { [0] = KEYS[16], [1] = KEYS[17] }
  for at = period, period - 1, -1 do
    local found = redis.call("HMGET", K.results[at % 2], "", "k" .. ARGV[2])
    reply[#reply + 1] = tonumber(found[1]) == at and found[2] or ""
  end
  return reply
end
return run_steps(K, now_ms, steps)
