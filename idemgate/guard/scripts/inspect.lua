--- Return all fields of a key's record. Writes nothing.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, state, owner, fence, attempts, remaining lease ms, remaining retention ms, fingerprint, kind, result,
---         checkpoint, times taken over, "1" if held, state entered at ms}; in state "absent" the rest has no meaning
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/read_record"
local key = KEYS[1]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read_record(key)
if not r then
  return { "foreign", now_ms, problem }
end
local state, retained, data = r.state, r.ends - now_ms, r.data
local left, result, checkpoint = 0, "", data
if state == "p" then
  left, retained = lease_left(r.ends, r.lease, now_ms), 0
elseif retained <= 0 then
  state = "absent"
elseif state ~= "r" then
  result, checkpoint = data, ""
end
return { "ok", now_ms, state, r.owner, r.fence, r.attempts, left, retained, r.print, r.kind,
  result, checkpoint, r.taken, r.held == 1 and "1" or "", r.since }
