--- A heartbeat: the lease runs anew from now. Naturally idempotent.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] lease, ms
--- ARGV[4] how long attempts and checkpoint outlive the lease, ms
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/read"
--- @include "lib/recorded"
--- @include "lib/rewrite"
--- @include "lib/outlives"
local key, token, lease, keep = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.state ~= "p" or r.owner ~= token then
  return { "lost", now_ms }
end
r.ends, r.lease = now_ms + lease, lease
rewrite(key, recorded(r), outlives(r.held, lease + keep))
return { "ok", now_ms }
