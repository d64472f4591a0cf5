--- The work is done: keep its result (or its failure) until retention ends. Allowed after the lease lapsed, as long as
--- nobody took over. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] its fencing token, by which a copy of the completion is known; that of an earlier grant completes nothing
--- ARGV[4] retention, ms
--- ARGV[5] kind of result: "v" a value, "n" none was storable, "e" a failure
--- ARGV[6] result
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/read"
--- @include "lib/rewrite"
--- @include "lib/ended"
--- @include "lib/wake"
local key, retention, kind = KEYS[1], tonumber(ARGV[4]), ARGV[5]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.state ~= "p" then
  local mine = r.kind ~= "" and r.owner == "" and r.fence == tonumber(ARGV[3])
  return { mine and "ok" or "lost", now_ms }
end
if r.owner ~= ARGV[2] or r.fence ~= tonumber(ARGV[3]) then
  return { "lost", now_ms }
end
rewrite(key, ended(r, kind == "e" and "f" or "d", kind, "", now_ms + retention, now_ms, ARGV[6]), retention)
wake(key, r)
return { "ok", now_ms }
