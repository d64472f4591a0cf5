--- Forget a key: the next claim is the first. A live claim is forgotten only by force. Leaves a tombstone for a minute, so that a
--- copy of this request gets the same answer; one that comes when others had their turn changes nothing. Replayed: the same answer.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] fencing token of what is to be forgotten, as inspected
--- ARGV[4] "1" = even while an owner's lease holds
--- ARGV[5] "1" = it was in progress when inspected: what has ended since is not what was meant
--- Returns {"forgotten", now ms} {"absent", now ms} {"changed", now ms} (it has another token by now, or has ended)
---         {"busy", now ms, lease left ms, attempt} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/read"
--- @include "lib/record"
--- @include "lib/rewrite"
--- @include "lib/lease_holds"
--- @include "lib/wake"
local key, request = KEYS[1], ARGV[2]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read(key)
if not r then
  return { "foreign", now_ms, problem }
end
local state = r.state
if r.owner == request then
  return { "forgotten", now_ms }
end
if state == "absent" or (state ~= "p" and r.ends <= now_ms) then
  return { "absent", now_ms }
end
if r.fence ~= tonumber(ARGV[3]) or (state == "p") ~= (ARGV[5] == "1") then
  return { "changed", now_ms }
end
if state == "p" and ARGV[4] ~= "1" then
  local left = lease_holds(key, r, now_ms)
  if left > 0 then
    return { "busy", now_ms, left, r.attempts }
  end
end
-- Ended before it began, whatever the clock says: what reads it finds nothing.
rewrite(key, record("r", "", request, r.fence, 0, 0, 0, now_ms, "", ""), 60000)
wake(key, r.waited, r.owner)
return { "forgotten", now_ms }
