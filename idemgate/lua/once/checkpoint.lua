--- Keep a note for the next attempt of this key, should this one not finish. Naturally idempotent.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] the note
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/record"
local key, token = KEYS[1], ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local found, problem = record(key)
if not found then
  return { "foreign", now_ms, problem }
end
if found.s ~= "p" or found.o ~= token then
  return { "lost", now_ms }
end
redis.call("HSET", key, "c", ARGV[3])
return { "ok", now_ms }
