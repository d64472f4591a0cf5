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
--- @include "lib/record"
--- @include "lib/read"
--- @include "lib/rewrite"
--- @include "lib/ended"
--- @include "lib/wake"
local key, token, retention, kind = KEYS[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
local state = r[record.state]
if r[record.owner] ~= token or state == "r" or state == "absent" then
  return { "lost", now_ms }
end
if state ~= "p" then
  return { "ok", now_ms }
end
rewrite(key, ended(r, kind == "e" and "f" or "d", now_ms + retention, now_ms, ARGV[5], kind), retention)
wake(key, r)
return { "ok", now_ms }
