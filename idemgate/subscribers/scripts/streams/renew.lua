--- Reset the idle time of a consumer's pending entries (heartbeat). Idempotent.
--- KEYS[1] the stream; idemgate does not own it
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] group
--- ARGV[3] consumer
--- ARGV[4..] id of each entry
--- Returns {"ok", now ms, then "renewed" | "lost" for each}
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local reply, held = { "ok", now_ms }, {}
for i = 4, #ARGV, 1 do
  local pending = redis.call("XPENDING", KEYS[1], ARGV[2], ARGV[i], ARGV[i], 1)[1]
  if pending and pending[2] == ARGV[3] then
    held[#held + 1] = ARGV[i]
    reply[#reply + 1] = "renewed"
  else
    reply[#reply + 1] = "lost"
  end
end
if #held > 0 then
  held[#held + 1] = "JUSTID" -- without it the command counts a delivery
  redis.call("XCLAIM", KEYS[1], ARGV[2], ARGV[3], 0, unpack(held))
end
return reply
