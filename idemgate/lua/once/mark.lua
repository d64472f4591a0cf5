--- Mark a key as done before the work runs (at most once): one trip, no lease, no result. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] retention, ms
--- ARGV[4] fingerprint, or ""
--- Returns {"started", now ms, fence, attempt} {"done", now ms, kind, result, fence, attempt, done at ms, retention left ms}
---         {"busy", now ms, lease left ms, attempt} (claimed with a lease, elsewhere) {"reused", now ms}
---         {"held", now ms, attempt} (its owner vanished, and it waits for a decision) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fence"
--- @include "lib/digits"
--- @include "lib/record"
--- @include "lib/lease_left"
local key, token, retention, print = KEYS[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end

local finished = (found.s == "d" or found.s == "f") and tonumber(found.t) > now_ms
if finished and found.o == token then
  return { "started", now_ms, tonumber(found.f), tonumber(found.n) }
end
if (finished or found.s == "p") and (found.p or "") ~= print then
  return { "reused", now_ms }
end
if finished then
  return { "done", now_ms, found.k, found.r or "", tonumber(found.f), tonumber(found.n), tonumber(found.a),
    tonumber(found.t) - now_ms }
end
if found.s == "p" then
  local left = lease_left(found.e, found.l, now_ms)
  if left > 0 then
    return { "busy", now_ms, left, tonumber(found.n) }
  end
  if found.h then
    return { "held", now_ms, tonumber(found.n) }
  end
end

local token_number = fence(found.f, now_us)
redis.call("HSET", key, "s", "1d", "o", token, "f", digits(token_number), "n", 1, "k", "n",
  "t", digits(now_ms + retention), "a", digits(now_ms))
if found.s ~= "absent" then
  redis.call("HDEL", key, "e", "l", "r", "c", "x", "w", "h", "p")
end
if print ~= "" then
  redis.call("HSET", key, "p", print)
end
redis.call("PEXPIRE", key, retention)
return { "started", now_ms, token_number, 1 }
