--- Take the right to run a key, or say why not. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] lease, ms
--- ARGV[4] how long attempts and checkpoint outlive the lease, ms
--- ARGV[5] fingerprint, or ""
--- ARGV[6] attempts allowed, 0 = any number
--- ARGV[7] "1" = hold the key when this owner vanishes
--- ARGV[8] "1" = the caller will wait for the end
--- Returns {"started", now ms, fence, attempt, times taken over, checkpoint or ""}
---         {"busy", now ms, lease left ms, attempt} {"done", now ms, kind, result, fence, attempt, done at ms, retention left ms}
---         {"reused", now ms} {"held", now ms, attempt} {"exhausted", now ms, attempts}
---         {"stale", now ms} (this token was released before) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fence"
--- @include "lib/read"
--- @include "lib/record"
--- @include "lib/write"
--- @include "lib/lease_left"
--- @include "lib/outlives"
local key, token, lease, keep, print = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end

local state, attempts, taken, checkpoint = r.state, r.attempts, r.taken, ""
local finished = state == "d" or state == "f"
if state ~= "p" and r.ends <= now_ms then
  state, finished, attempts, taken = "absent", false, 0, 0
end
if state == "p" or state == "r" then
  checkpoint = r.data
end
if r.owner == token then
  if state == "p" then
    return { "started", now_ms, r.fence, attempts, taken, checkpoint }
  elseif state == "r" then
    return { "stale", now_ms }
  end
end
if (finished or state == "p") and r.print ~= print then
  return { "reused", now_ms }
end
if finished then
  return { "done", now_ms, r.kind, r.data, r.fence, attempts, r.since, r.ends - now_ms }
end
if state == "p" then
  local left = lease_left(r, now_ms)
  if left > 0 then
    local ends, waited = now_ms + left, ARGV[8] == "1" and 1 or r.waited
    if waited ~= r.waited or ends ~= r.ends then
      -- Where the clock was set back, the lease ends from now on as if it had begun now.
      r.waited, r.ends = waited, ends
      redis.call("SET", key, record(r), "KEEPTTL")
    end
    return { "busy", now_ms, left, attempts }
  end
  if r.held == 1 then
    return { "held", now_ms, attempts }
  end
  taken = taken + 1
end
local allowed = tonumber(ARGV[6])
if allowed > 0 and attempts >= allowed then
  return { "exhausted", now_ms, attempts }
end

local token_number, held = fence(r.fence, now_us), tonumber(ARGV[7])
attempts = attempts + 1
-- The one write is one the server refuses when out of memory: all or nothing.
write(key, {
  state = "p", kind = "", owner = token, fence = token_number, attempts = attempts, taken = taken, ends = now_ms + lease,
  since = now_ms, print = print, data = checkpoint, lease = lease, held = held, waited = 0,
}, outlives(held, lease + keep))
return { "started", now_ms, token_number, attempts, taken, checkpoint }
