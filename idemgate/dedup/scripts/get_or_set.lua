--- Store a small value for each of some ids in one shard of a dedup set. The first value of an id within the window
--- stays. A retry with the same check gets the same answer.
--- KEYS[1] page (dedup/lib/pages), with values
--- KEYS[2] page; ids are marked in the younger one, and looked up in both
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] window, ms
--- ARGV[3] check, 5 bytes unique to the request
--- ARGV[4..] two an id: digest, 8 bytes, all different; value, 17 bytes
--- Returns {"ok", now ms, then two an id: 1 if this request's value is stored, 0 if another one was; the stored value}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "dedup/lib/pages"
--- @include "dedup/lib/marks"
local now_ms, window, check = math.floor(now(ARGV[1]) / 1000), tonumber(ARGV[2]), ARGV[3]
local young, old, problem = open_pages(KEYS[1], KEYS[2], 34, window, now_ms)
if problem then
  return { "foreign", now_ms, problem }
end

local reply = { "ok", now_ms }
for i = 4, #ARGV, 2 do
  local digest = ARGV[i]
  local known, value = find_in_pages(young, old, digest, check, window, now_ms)
  if known < 0 then
    value = ARGV[i + 1]
    add_mark(young, old, digest, check, now_ms, value)
  end
  reply[#reply + 1] = known == 0 and 0 or 1
  reply[#reply + 1] = value
end
problem = young.problem or old.problem
if problem then
  return { "foreign", now_ms, problem }
end
store_pages(young, old, window, now_ms)
return reply
