--- Return the value stored for an id in one shard of a dedup set. Writes nothing.
--- KEYS[1] page (dedup/lib/pages), with values
--- KEYS[2] page
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] digest of the id, 8 bytes
--- Returns {"ok", now ms, value, 17 bytes, or "" if none is stored} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "dedup/lib/pages"
--- @include "dedup/lib/marks"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local young, old, problem = read_pages(KEYS[1], KEYS[2], 34)
if problem then
  return { "foreign", now_ms, problem }
end
local _, value = find_in_pages(young, old, ARGV[2], "", math.huge, now_ms)
problem = young.problem or old.problem
if problem then
  return { "foreign", now_ms, problem }
end
return { "ok", now_ms, value }
