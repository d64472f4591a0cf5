--- Ask the owner of a key to stop. The reply to its next heartbeat tells it. Idempotent. A late copy, after another
--- claim, changes nothing.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] fencing token of the run to cancel, as inspected
--- Returns {"ok", now ms} {"absent", now ms} (that run has no live lease) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/write_record"
local key = KEYS[1]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read_record(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.state ~= "p" or r.fence ~= tonumber(ARGV[2]) or lease_left(r.ends, r.lease, now_ms) <= 0 then
  return { "absent", now_ms }
end
r.cancelled = 1
redis.call("SET", key, pack_record_table(r), "KEEPTTL")
return { "ok", now_ms }
