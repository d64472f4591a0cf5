--- Delete a consumer from a group, unless it has pending entries: the group would forget them.
--- KEYS[1] the stream; idemgate does not own it
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] group
--- ARGV[3] consumer
--- Returns {"left", now ms} {"kept", now ms}
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
if #redis.call("XPENDING", KEYS[1], ARGV[2], "-", "+", 1, ARGV[3]) > 0 then
  return { "kept", now_ms }
end
redis.call("XGROUP", "DELCONSUMER", KEYS[1], ARGV[2], ARGV[3])
return { "left", now_ms }
