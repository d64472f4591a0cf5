--- Mark a key as done before the work runs (at most once): one round trip, no lease, no result. A retry with the same
--- token gets the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner id
--- ARGV[3] retention, ms
--- ARGV[4] fingerprint, or ""
--- Returns {"started", now ms, fence, attempt} {"done", now ms, kind, result, fence, attempt, done at ms, remaining retention ms}
---         {"busy", now ms, remaining lease ms, attempt} (claimed with a lease, elsewhere) {"reused", now ms}
---         {"held", now ms, attempt} (its owner died, and it waits for a decision) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fence"
--- @include "guard/lib/write_record"
local key, id, retention, print = KEYS[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local r, problem = read_record(key)
if not r then
  return { "foreign", now_ms, problem }
end

local state = r.state
local finished = (state == "d" or state == "f") and r.ends > now_ms
if finished and r.owner == id then
  return { "started", now_ms, r.fence, r.attempts }
end
if (finished or state == "p") and r.print ~= print then
  return { "reused", now_ms }
end
if finished then
  return { "done", now_ms, r.kind, r.data, r.fence, r.attempts, r.since,
    r.ends - now_ms }
end
if state == "p" then
  local left = clamp_lease(key, r, now_ms)
  if left > 0 then
    return { "busy", now_ms, left, r.attempts }
  end
  if r.held == 1 then
    return { "held", now_ms, r.attempts }
  end
end

local token = fence(r.fence, now_us)
write_record(key, {
  state = "d", kind = "n", owner = id, fence = token, attempts = 1, taken = 0, ends = now_ms + retention, since = now_ms,
  print = print, data = "",
}, ARGV[3])
return { "started", now_ms, token, 1 }
