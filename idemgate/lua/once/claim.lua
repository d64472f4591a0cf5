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
--- @include "lib/digits"
--- @include "lib/record"
--- @include "lib/lease_left"
--- @include "lib/outlives"
local key, token, lease, keep, print = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end

local state = found.s
local attempts, taken_over = tonumber(found.n) or 0, tonumber(found.x) or 0
local finished = state == "d" or state == "f"
if finished and tonumber(found.t) <= now_ms then
  state, finished, attempts, taken_over = "absent", false, 0, 0
end
if state == "r" and tonumber(found.t) <= now_ms then
  state, attempts, taken_over, found.c = "absent", 0, 0, nil
end
if state == "p" and found.o == token then
  return { "started", now_ms, tonumber(found.f), attempts, taken_over, found.c or "" }
end
if state == "r" and found.o == token then
  return { "stale", now_ms }
end
if (finished or state == "p") and (found.p or "") ~= print then
  return { "reused", now_ms }
end
if finished then
  return { "done", now_ms, found.k, found.r or "", tonumber(found.f), attempts, tonumber(found.a),
    tonumber(found.t) - now_ms }
end
if state == "p" then
  local left = lease_left(found.e, found.l, now_ms)
  if left > 0 then
    if ARGV[8] == "1" and not found.w then
      redis.call("HSET", key, "w", "1")
    end
    return { "busy", now_ms, left, attempts }
  end
  if found.h then
    return { "held", now_ms, attempts }
  end
  taken_over = taken_over + 1
end
local allowed = tonumber(ARGV[6])
if allowed > 0 and attempts >= allowed then
  return { "exhausted", now_ms, attempts }
end

local token_number = fence(found.f, now_us)
attempts = attempts + 1
-- The first write is one the server refuses when out of memory: all or nothing.
redis.call("HSET", key, "s", "1p", "o", token, "f", digits(token_number), "n", attempts,
  "e", digits(now_ms + lease), "l", ARGV[3], "a", digits(now_ms))
if found.s ~= "absent" then
  redis.call("HDEL", key, "t", "k", "r", "w", "h", "p", "x")
  if state == "absent" then
    redis.call("HDEL", key, "c")
    found.c = nil
  end
end
if print ~= "" then
  redis.call("HSET", key, "p", print)
end
if taken_over > 0 then
  redis.call("HSET", key, "x", taken_over)
end
if ARGV[7] == "1" then
  redis.call("HSET", key, "h", "1")
end
redis.call("PEXPIRE", key, outlives(ARGV[7] == "1", lease + keep))
return { "started", now_ms, token_number, attempts, taken_over, found.c or "" }
