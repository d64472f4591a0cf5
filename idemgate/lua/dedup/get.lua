--- Tell what is kept for an id in one shard of a seen-set. Writes nothing.
--- KEYS[1] page (lib/page), of marks that have values
--- KEYS[2] page
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] digest of the id, 8 bytes
--- Returns {"ok", now ms, value, 17 bytes, or "" when none is kept} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/page"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local young, old, problem = pages(KEYS[1], KEYS[2], 34)
if problem then
  return { "foreign", now_ms, problem }
end
local _, value = marked(young, old, ARGV[2], "", math.huge, now_ms)
problem = young.problem or old.problem
if problem then
  return { "foreign", now_ms, problem }
end
return { "ok", now_ms, value }
