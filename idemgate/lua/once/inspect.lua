--- Everything the record of a key says. Writes nothing.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, state, owner, fence, attempts, lease left ms, retention left ms, fingerprint, kind, result, checkpoint,
---         times taken over, "1" if held, entered at ms}; a state of "absent" has no meaning in the rest
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/record"
--- @include "lib/lease_left"
local key = KEYS[1]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end
local state = found.s
local retained = (tonumber(found.t) or 0) - now_ms
if state ~= "p" and retained <= 0 then
  state = "absent"
end
return { "ok", now_ms, state, found.o or "", tonumber(found.f) or 0, tonumber(found.n) or 0,
  lease_left(found.e, found.l, now_ms), retained, found.p or "", found.k or "", found.r or "", found.c or "",
  tonumber(found.x) or 0, found.h or "", tonumber(found.a) or 0 }
