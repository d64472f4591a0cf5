--- The work is done: keep its result (or its failure) until retention ends. Allowed after the lease lapsed, as long as
--- nobody took over. Replayed by the same token: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner token
--- ARGV[3] its fencing token, by which a copy of the completion is known; that of an earlier grant completes nothing
--- ARGV[4] retention, ms
--- ARGV[5] kind of result: "v" a value, "n" none was storable, "e" a failure
--- ARGV[6] result
--- Returns packed "k": kept {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fields"
--- @include "lib/record"
--- @include "lib/rewrite"
--- @include "lib/wake"
local key, kind = KEYS[1], ARGV[5]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local state, had, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited = fields(redis.pcall("GET", key))
if not state then
  return { "foreign", now_ms, had }
end
local granted = fence == tonumber(ARGV[3])
if state ~= "p" then
  if had ~= "" and owner == "" and granted then
    return "k"
  end
  return { "lost", now_ms }
end
if owner ~= ARGV[2] or not granted then
  return { "lost", now_ms }
end
rewrite(key, record(kind == "e" and "f" or "d", kind, "", fence, attempts, taken, now_ms + tonumber(ARGV[4]), now_ms, print, ARGV[6]), ARGV[4])
wake(key, waited, owner)
return "k"
