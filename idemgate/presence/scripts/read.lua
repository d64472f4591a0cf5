--- Return the reports of processes. Writes nothing.
--- KEYS[1..] presence:<id>, at most 100
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then the report of each key; "" = it has expired} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local reports = {}
for i = 1, #KEYS do
  local report = redis.pcall("GET", KEYS[i])
  if type(report) == "table" then
    raise_refusal(report.err)
    return { "foreign", now_ms, KEYS[i] .. " holds another type than a string" }
  end
  reports[i] = report or ""
end
return { "ok", now_ms, unpack(reports) }
