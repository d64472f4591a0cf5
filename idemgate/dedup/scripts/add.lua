--- Mark ids in one shard of a dedup set, and return which of them are new. A retry with the same check gets the same
--- answer.
--- KEYS[1] page (dedup/lib/pages)
--- KEYS[2] page; ids are marked in the younger one, and looked up in both
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] window, ms
--- ARGV[3] check, 5 bytes unique to the request
--- ARGV[4..] digests of ids, 8 bytes each, all different
--- Returns {"ok", now ms, then 1 for a new id, 0 for one marked within the window}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "dedup/lib/pages"
--- @include "dedup/lib/marks"
local now_ms, window, check = math.floor(now(ARGV[1]) / 1000), tonumber(ARGV[2]), ARGV[3]
local young, old, problem = open_pages(KEYS[1], KEYS[2], 17, window, now_ms)
if problem then
  return { "foreign", now_ms, problem }
end

local reply = { "ok", now_ms }
for i = 4, #ARGV do
  local digest = ARGV[i]
  local known = find_in_pages(young, old, digest, check, window, now_ms)
  if known < 0 then
    add_mark(young, old, digest, check, now_ms, "")
  end
  reply[#reply + 1] = known == 0 and 0 or 1
end
problem = young.problem or old.problem
if problem then
  return { "foreign", now_ms, problem }
end
store_pages(young, old, window, now_ms)
return reply
