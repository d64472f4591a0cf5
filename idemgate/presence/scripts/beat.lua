--- Store what a process reports of itself, and drop the processes from the index whose reports have expired.
--- KEYS[1] presence
--- KEYS[2] presence:<id>
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] id of the process, 32 hex digits
--- ARGV[3] the report, packed by the client
--- ARGV[4] ms until the report expires
--- Returns {"ok", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local index, now_ms = KEYS[1], math.floor(now(ARGV[1]) / 1000)
local former = redis.pcall("STRLEN", KEYS[2])
if type(former) == "table" then
  raise_refusal(former.err)
  return { "foreign", now_ms, KEYS[2] .. " holds another type than a string" }
end
-- The first write, because no server out of memory refuses it, or what follows it: operators look for processes then.
local dropped = redis.pcall("ZREMRANGEBYSCORE", index, "-inf", now_ms - tonumber(ARGV[4]))
if type(dropped) == "table" then
  raise_refusal(dropped.err)
  return { "foreign", now_ms, index .. " holds another type than a sorted set" }
end
redis.call("SET", KEYS[2], ARGV[3], "PX", ARGV[4])
redis.call("ZADD", index, now_ms, ARGV[2])
redis.call("PEXPIRE", index, ARGV[4])
return { "ok", now_ms }
