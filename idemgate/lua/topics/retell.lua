--- Show the replies that a closed slot gave lately, some hundred a call. Writes nothing.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "0" | "1", which of the two logs
--- ARGV[3] where to go on, as the call before said; "0" at first
--- Returns {"ok", now ms, where to go on ("0" = that was all), half minute, then two a reply: request id, reply}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/wrong"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = wrong(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
end
local told = K.told[tonumber(ARGV[2])]
local half = tonumber(redis.call("HGET", told, "")) or 0
if half < math.floor(now_ms / 30000) - 1 then
  return { "ok", now_ms, "0", half }
end
local found = redis.call("HSCAN", told, ARGV[3], "COUNT", 500)
local reply = { "ok", now_ms, found[1], half }
for i = 1, #found[2], 2 do
  if found[2][i] ~= "" then
    reply[#reply + 1] = found[2][i]
    reply[#reply + 1] = found[2][i + 1]
  end
end
return reply
