--- Mark many keys as done and return which of them were new: guard/mark without fingerprints. It does not work in a
--- cluster, where records are in different hash slots. A retry with the same owner id gets the same answer.
--- KEYS[1..] records, all different
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner id
--- ARGV[3] retention, ms
--- Returns {"ok", now ms, then one a record: "first" | "known"} {"foreign", now ms, problem} (nothing was marked)
--- @include "lib/now"
--- @include "lib/fence"
--- @include "guard/lib/write_record"
local id, retention = ARGV[2], tonumber(ARGV[3])
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local found = {}
for i, key in ipairs(KEYS) do
  local r, problem = read_record(key)
  if not r then
    return { "foreign", now_ms, key .. " " .. problem }
  end
  found[i] = r
end

local function is_done_or_running(key, r)
  local state = r.state
  if state == "p" then
    return r.print ~= "" or r.held == 1 or clamp_lease(key, r, now_ms) > 0
  end
  return (state == "d" or state == "f") and r.ends > now_ms
end

local reply = { "ok", now_ms }
for i, key in ipairs(KEYS) do
  local r = found[i]
  if not is_done_or_running(key, r) then
    write_record(key, {
      state = "d", kind = "n", owner = id, fence = fence(r.fence, now_us), attempts = 1, taken = 0, ends = now_ms + retention,
      since = now_ms, print = "", data = "",
    }, ARGV[3])
    reply[#reply + 1] = "first"
  elseif r.state ~= "p" and r.owner == id then
    reply[#reply + 1] = "first"
  else
    reply[#reply + 1] = "known"
  end
end
return reply
