--- Return the reports of processes, each with its time. Writes nothing.
--- KEYS[1] presence
--- KEYS[1..] it, then presence:<id> of at most 100 processes
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then for each report: it, and its time, ms; "" and "" = it has expired} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local index, now_ms = KEYS[1], math.floor(now(ARGV[1]) / 1000)
local found = {}
for i = 2, #KEYS do
  local report = redis.pcall("GET", KEYS[i])
  -- Read with the report: since `list` ran, the process may have sent another one.
  local time = redis.pcall("ZSCORE", index, string.sub(KEYS[i], #index + 2))
  local refused = type(report) == "table" and report or type(time) == "table" and time
  if refused then
    raise_refusal(refused.err)
    return { "foreign", now_ms, KEYS[i] .. " or its index holds another type" }
  end
  local both = report and time
  found[#found + 1], found[#found + 2] = both and report or "", both and time or ""
end
return { "ok", now_ms, unpack(found) }
