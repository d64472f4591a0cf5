--- Keep a note for the next attempt of this key, should this one not finish. Naturally idempotent.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] the note
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/read"
--- @include "lib/recorded"
local key, token = KEYS[1], ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.state ~= "p" or r.owner ~= token then
  return { "lost", now_ms }
end
r.data = ARGV[3]
redis.call("SET", key, recorded(r), "KEEPTTL")
return { "ok", now_ms }
