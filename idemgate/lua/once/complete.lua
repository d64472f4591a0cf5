--- The work is done: keep its result (or its failure) until retention ends. Allowed after the lease lapsed, as long as
--- nobody took over. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] retention, ms
--- ARGV[4] kind of result: "v" a value, "n" none was storable, "e" a failure
--- ARGV[5] result
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/record"
--- @include "lib/wake"
local key, token, retention, kind = KEYS[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end
if found.o ~= token or found.s == "r" or found.s == "absent" then
  return { "lost", now_ms }
end
if found.s ~= "p" then
  return { "ok", now_ms }
end

-- The first write frees memory, so that a finished piece of work is recorded even when the server has none left.
redis.call("HDEL", key, "e", "l", "c", "w", "h")
redis.call("HSET", key, "s", kind == "e" and "1f" or "1d", "t", digits(now_ms + retention), "k", kind, "r", ARGV[5],
  "a", digits(now_ms))
redis.call("PEXPIRE", key, retention)
wake(key, found)
return { "ok", now_ms }
