--- Take the right to run a key, or say why not. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] fingerprint, or ""
--- ARGV[4] how long the record of the claim stays, ms, so that attempts and checkpoint outlive the lease
--- ARGV[5] terms, packed as >I6I4BB: lease, ms; attempts allowed, 0 = any number; 1 = hold the key when this owner vanishes;
---         1 = the caller will wait for the end
--- Returns packed "s": started; then fence, attempt, times taken over as >I8I4I4; checkpoint or nothing
---         packed "d": done; then kind, fence, attempt, retention left ms as >c1I8I4I8; result
---         {"busy", now ms, lease left ms, attempt} {"reused", now ms} {"held", now ms, attempt} {"exhausted", now ms, attempts}
---         {"stale", now ms} (this token was released before) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fence"
--- @include "lib/fields"
--- @include "lib/record"
--- @include "lib/lease_left"
local key, token, print, now_us = KEYS[1], ARGV[2], ARGV[3], now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local state, kind, owner, last, attempts, taken, ends, since, known, data, lease, held, waited = fields(redis.pcall("GET", key))
if not state then
  return { "foreign", now_ms, kind }
end

local running, finished = state == "p", kind ~= ""
if not running and ends <= now_ms then
  state, finished, attempts, taken, data = "absent", false, 0, 0, ""
end
if finished then
  if known ~= print then
    return { "reused", now_ms }
  end
  return struct.pack(">c1c1I8I4I8", "d", kind, last, attempts, ends - now_ms) .. data
end
if owner == token and state ~= "absent" then
  if running then
    return struct.pack(">c1I8I4I4", "s", last, attempts, taken) .. data
  end
  return { "stale", now_ms }
end
local span, allowed, hold, wait = struct.unpack(">I6I4BB", ARGV[5])
if running then
  if known ~= print then
    return { "reused", now_ms }
  end
  local left = lease_left(ends, lease, now_ms)
  if left > 0 then
    local later, wanted = now_ms + left, wait == 1 and 1 or waited
    if wanted ~= waited or later ~= ends then
      -- Where the clock was set back, the lease ends from now on as if it had begun now.
      local again = record(state, kind, owner, last, attempts, taken, later, since, known, data, lease, held, wanted)
      redis.call("SET", key, again, "KEEPTTL")
    end
    return { "busy", now_ms, left, attempts }
  end
  if held == 1 then
    return { "held", now_ms, attempts }
  end
  taken = taken + 1
end
if allowed > 0 and attempts >= allowed then
  return { "exhausted", now_ms, attempts }
end

last, attempts = fence(last, now_us), attempts + 1
-- The one write is one the server refuses when out of memory: all or nothing.
local begun = record("p", "", token, last, attempts, taken, now_ms + span, now_ms, print, data, span, hold, 0)
redis.call("SET", key, begun, "PX", ARGV[4])
return struct.pack(">c1I8I4I4", "s", last, attempts, taken) .. data
