--- Store a checkpoint for the next attempt of this key, in case this one does not finish. Idempotent.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner id
--- ARGV[3] checkpoint
--- Returns {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/write_record"
local key, id = KEYS[1], ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read_record(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.state ~= "p" or r.owner ~= id then -- fault: note-owner
  return { "lost", now_ms }
end
r.data = ARGV[3]
redis.call("SET", key, pack_record_table(r), "KEEPTTL")
return { "ok", now_ms }
