--- Return the reports of processes. Writes nothing.
--- KEYS[1..] presence:<id>, at most 100
--- ARGV[1] now, us, or "" for the server's
--- Returns {"ok", now ms, then the report of each key; false = it has expired, or the key has another type}
--- @include "lib/now"
--- @include "lib/raise_refusal"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local reports = {}
for i = 1, #KEYS do
  reports[i] = redis.pcall("GET", KEYS[i])
  if type(reports[i]) == "table" then
    raise_refusal(reports[i].err)
    reports[i] = false
  end
end
return { "ok", now_ms, unpack(reports) }
