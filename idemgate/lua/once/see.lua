--- Mark ids in one shard of a seen-set, and say which of them are new. Replayed with the same check: the same answer.
--- KEYS[1] page (lib/page)
--- KEYS[2] page; ids are marked in the younger one, and looked for in both
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] window, ms
--- ARGV[3] check, 5 bytes that other requests do not have
--- ARGV[4..] digests of ids, 8 bytes each, no two the same
--- Returns {"ok", now ms, then 1 for an id that is new, 0 for one that was marked within the window}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/page"
local now_ms, window, check = math.floor(now(ARGV[1]) / 1000), tonumber(ARGV[2]), ARGV[3]
local young, problem = page(KEYS[1])
local old, other = page(KEYS[2])
if problem or other then
  return { "foreign", now_ms, problem or other }
end
if old.start > young.start then
  young, old = old, young
end
if young.ends <= now_ms then
  problem = stray(young) or stray(old)
  if problem then
    return { "foreign", now_ms, problem }
  end
  young, old = turned(old, young, window, now_ms), young
end

local reply = { "ok", now_ms }
for i = 4, #ARGV do
  local digest = ARGV[i]
  local known = math.max(marked(young, digest, check, window, now_ms), marked(old, digest, check, window, now_ms))
  if known < 0 then
    mark(young, digest, check, now_ms)
    trim(old, digest, now_ms)
  end
  reply[#reply + 1] = known == 0 and 0 or 1
end
problem = young.problem or old.problem
if problem then
  return { "foreign", now_ms, problem }
end
if next(young.changed) then
  outlast(young, window)
  store(young, now_ms)
  store(old, now_ms)
end
return reply
