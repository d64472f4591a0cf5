--- Let any consumer reclaim a pending entry later. Only its consumer may: another one runs what it has reclaimed.
--- Idempotent.
--- KEYS[1] the stream; idemgate does not own it
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] group
--- ARGV[3] consumer
--- ARGV[4] id of the entry
--- ARGV[5] idle time from now on, ms
--- ARGV[6] number of deliveries from now on
--- Returns {"released", now ms} {"lost", now ms}
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local pending = redis.call("XPENDING", KEYS[1], ARGV[2], ARGV[4], ARGV[4], 1)[1]
if not pending or pending[2] ~= ARGV[3] then
  return { "lost", now_ms }
end
redis.call(
  "XCLAIM", KEYS[1], ARGV[2], ARGV[3], 0, ARGV[4], "IDLE", ARGV[5], "RETRYCOUNT", ARGV[6], "JUSTID"
)
return { "released", now_ms }
