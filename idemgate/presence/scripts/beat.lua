--- Store what a process reports of itself, and drop the processes from the index whose reports have expired.
--- KEYS[1] presence
--- KEYS[2] presence:<id>
--- KEYS[3] presence:names, only if the name of the process is given
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] id of the process, 32 hex digits
--- ARGV[3] the report, packed by the client
--- ARGV[4] ms until the report expires
--- ARGV[5] what the ids of its requests begin with, 8 bytes, and its name, only if the name is to be stored
--- Returns {"ok", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local index, now_ms = KEYS[1], math.floor(now(ARGV[1]) / 1000)
local former = redis.pcall("STRLEN", KEYS[2])
if type(former) == "table" then
  raise_refusal(former.err)
  return { "foreign", now_ms, KEYS[2] .. " holds another type than a string" }
end
local known = KEYS[3] and redis.pcall("ZCARD", KEYS[3])
if type(known) == "table" then
  raise_refusal(known.err)
  return { "foreign", now_ms, KEYS[3] .. " holds another type than a sorted set" }
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
if KEYS[3] then
  -- Names are kept longer than reports: histories refer to processes that have ended.
  redis.call("ZADD", KEYS[3], now_ms, ARGV[5])
  redis.call("ZREMRANGEBYRANK", KEYS[3], 0, -1001)
  redis.call("PEXPIRE", KEYS[3], "2592000000")
end
return { "ok", now_ms }
