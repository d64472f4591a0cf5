--- Store what a process reports of itself, and drop processes from the index whose last report is old.
--- KEYS[1] presence
--- KEYS[2] presence:<id>
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] id of the process, 32 hex digits
--- ARGV[3] the report, packed by the client
--- ARGV[4] ms until the report expires
--- ARGV[5] ms until the index drops a process that reports no more
--- Returns {"ok", now ms, 1} {"ok", now ms, 0 = out of memory: the former report stays longer} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local index, key = KEYS[1], KEYS[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local dropped = redis.pcall("ZREMRANGEBYSCORE", index, "-inf", now_ms - tonumber(ARGV[5]))
if type(dropped) == "table" then
  raise_refusal(dropped.err)
  return { "foreign", now_ms, "holds another type than a sorted set" }
end
local stored = redis.pcall("SET", key, ARGV[3], "PX", ARGV[4])
if stored.err then
  if not string.find(stored.err, "OOM", 1, true) then
    error(stored)
  end
  -- No memory is the incident in which operators look for processes: the former report must not expire.
  redis.call("PEXPIRE", key, ARGV[4])
  return { "ok", now_ms, 0 }
end
redis.call("ZADD", index, now_ms, ARGV[2])
redis.call("PEXPIRE", index, ARGV[5])
return { "ok", now_ms, 1 }
