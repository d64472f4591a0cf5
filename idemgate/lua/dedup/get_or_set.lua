--- Keep a small value for each of some ids, in one shard of a seen-set, unless one is kept: the first stays. Replayed with the same check:
--- the same answer.
--- KEYS[1] page (lib/page), of marks that have values
--- KEYS[2] page; ids are marked in the younger one, and looked for in both
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] window, ms
--- ARGV[3] check, 5 bytes that other requests do not have
--- ARGV[4..] two an id: digest, 8 bytes, no two the same; value, 17 bytes
--- Returns {"ok", now ms, then two an id: 1 when this value is the one that is kept by now, 0 when another was within the window; the value
---         that is kept} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/page"
local now_ms, window, check = math.floor(now(ARGV[1]) / 1000), tonumber(ARGV[2]), ARGV[3]
local young, old, problem = open_pages(KEYS[1], KEYS[2], 34, window, now_ms)
if problem then
  return { "foreign", now_ms, problem }
end

local reply = { "ok", now_ms }
for i = 4, #ARGV, 2 do
  local digest = ARGV[i]
  local known, value = marked(young, old, digest, check, window, now_ms)
  if known < 0 then
    value = ARGV[i + 1]
    mark(young, old, digest, check, now_ms, value)
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
