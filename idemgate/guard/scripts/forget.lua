--- Forget a key, so that the next claim is the first. A live claim is forgotten only by force. A tombstone stays for
--- a minute, so a retry gets the same answer. A late retry, after another claim, changes nothing.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] fencing token of the record to forget, as inspected
--- ARGV[4] "1" = even while an owner's lease is live; "2" = its caller has also seen that claim for longer than
---         another client waits for the reply to its plain claim
--- ARGV[5] "1" = it was in progress when inspected: a record completed since is another one
--- Returns {"forgotten", now ms} {"absent", now ms} {"changed", now ms} (it has another token by now, or was completed)
---         {"early", now ms} (it was just claimed, and the reply may be on its way: see guard/lib/plain_record)
---         {"busy", now ms, remaining lease ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/write_record"
--- @include "guard/lib/format"
--- @include "guard/lib/replace_record"
local key, request = KEYS[1], ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read_record(key)
if not r then
  return { "foreign", now_ms, problem }
end
local state = r.state
if r.owner == request then -- fault: forget-copy
  return { "forgotten", now_ms }
end
if state == "absent" or (state ~= "p" and r.ends <= now_ms) then
  return { "absent", now_ms }
end
if r.fence ~= tonumber(ARGV[3]) or (state == "p") ~= (ARGV[5] == "1") then -- fault: forget-seen
  return { "changed", now_ms }
end
if state == "p" and ARGV[4] == "0" then -- fault: forget-live
  local left = clamp_lease(key, r, now_ms)
  if left > 0 then
    return { "busy", now_ms, left, r.attempts }
  end
end
-- The token of a plain claim is in whole ms, also after a script has stored it in the long form. A negative age, after
-- the clock was set back, is early, too.
if state == "p" and ARGV[4] == "1" and r.fence % 1000 == 0 and now_ms - r.since < 5000 then -- fault: forget-early
  return { "early", now_ms }
end
-- Its end is time 0, so readers find an expired record at any clock time.
replace_record(key, pack_record("r", "", request, r.fence, 0, 0, 0, now_ms, "", ""), 60000) -- fault: forgotten
notify_waiters(key, r.waited, r.owner)
return { "forgotten", now_ms }
