--- Return the stored replies of a closed slot, some hundred a call. Writes nothing.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "0" | "1", the hash to read
--- ARGV[3] cursor from the previous call; "0" at first
--- Returns {"ok", now ms, next cursor ("0" = done), half minute, then two a reply: request id, reply}
---         {"foreign", now ms, problem}
--- Keys: log
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
end
local log = K.replies[tonumber(ARGV[2])]
local half = tonumber(redis.call("HGET", log, "")) or 0
if half < math.floor(now_ms / 30000) - 1 then
  return { "ok", now_ms, "0", half }
end
local found = redis.call("HSCAN", log, ARGV[3], "COUNT", 500)
local reply = { "ok", now_ms, found[1], half }
for i = 1, #found[2], 2 do
  if found[2][i] ~= "" then
    reply[#reply + 1] = found[2][i]
    reply[#reply + 1] = found[2][i + 1]
  end
end
return reply
