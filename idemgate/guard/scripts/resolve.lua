--- Decide about a key whose owner died: it is done, with or without a result, or it may run again. A live claim stays
--- as it is. A retry gets the same answer. A late retry, after another claim, changes nothing.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] fencing token of the dead owner, as inspected
--- ARGV[4] "1" = done, "0" = may run again
--- ARGV[5] retention, ms
--- ARGV[6] kind of result: "v" or "n"
--- ARGV[7] result
--- Returns {"ok", now ms} {"absent", now ms} (nothing to resolve) {"changed", now ms} (it has another token by now)
---         {"busy", now ms, remaining lease ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/write_record"
--- @include "guard/lib/replace_record"
-- Build a record in a state in which no attempt runs, set by `owner`. Fields of a running claim are left out.
local function end_record(r, state, kind, owner, ends, now_ms, data)
  return {
    state = state, kind = kind, owner = owner, fence = r.fence, attempts = r.attempts, taken = r.taken, ends = ends, since = now_ms,
    print = r.print, data = data,
  }
end

local key, request, retention = KEYS[1], ARGV[2], tonumber(ARGV[5])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read_record(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.owner == request then -- fault: resolve-copy
  return { "ok", now_ms }
end
if r.state ~= "p" then
  return { "absent", now_ms }
end
if r.fence ~= tonumber(ARGV[3]) then -- fault: resolve-seen
  return { "changed", now_ms }
end
local left = clamp_lease(key, r, now_ms)
if left > 0 then -- fault: resolve-live
  return { "busy", now_ms, left, r.attempts }
end
-- The request id replaces the dead owner's id, so that owner's later calls are answered "lost".
local state, kind, data = "r", "", r.data -- fault: retry-allowed
if ARGV[4] == "1" then
  state, kind, data = "d", ARGV[6], ARGV[7]
end
replace_record(key, pack_record_table(end_record(r, state, kind, request, now_ms + retention, now_ms, data)), retention) -- fault: resolved
notify_waiters(key, r.waited, r.owner)
return { "ok", now_ms }
