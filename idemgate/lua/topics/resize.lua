--- Begin to change the number of slots of a topic, or to forget it; a change that has begun is only gone on with.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- ARGV[3] slots it is to have, 0 = it is to be forgotten
--- ARGV[4] name of this change, which the slots that it closes will bear
--- ARGV[5..] two a command: one that the change needs; a key of the topic that it is for
--- Returns {"refused", now ms, command} (this user may not; nothing was written; Redis before 7.0 cannot tell)
---         {"absent", now ms} {"same", now ms, policy} {"changing", now ms, policy, slots it is to have, name of the change}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/noted"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local kind = redis.call("TYPE", KEYS[1]).ok
if kind ~= "hash" and kind ~= "none" then
  return { "foreign", now_ms, "holds a " .. kind .. ", expected a hash" }
end
local stored = redis.call("HGET", KEYS[1], ARGV[2])
if not stored then
  return { "absent", now_ms }
end
local mark = redis.call("HGET", KEYS[1], ARGV[2] .. " to")
local whole, policy = pcall(cmsgpack.unpack, stored)
if not whole or type(policy) ~= "table" or not noted(mark, redis.call("HGET", KEYS[1], ARGV[2] .. " was")) then
  return { "foreign", now_ms, "holds under " .. ARGV[2] .. " what is no policy, or no change of it" }
end
if not mark and policy.slots == tonumber(ARGV[3]) then
  return { "same", now_ms, stored }
end
-- Redis 8.10 looks only at commands that have as many words as they take.
local function allowed(command, key)
  for _, words in ipairs({ { key }, {}, { key, "1" }, { key, "1", "1" }, { key, "1", "1", "1" } }) do
    local looked, answer = pcall(redis.acl_check_cmd, command, unpack(words))
    if looked then
      return answer
    end
  end
  return true
end

-- A change that is refused on its way leaves slots closed: so whoever may not do all of it may not begin.
for i = 5, redis.acl_check_cmd and #ARGV or 0, 2 do
  if not allowed(ARGV[i], ARGV[i + 1]) then
    return { "refused", now_ms, ARGV[i] }
  end
end
if not mark then
  mark = ARGV[3] .. " " .. ARGV[4]
  redis.call("HSET", KEYS[1], ARGV[2] .. " to", mark)
end
local to, name = string.match(mark, "^(%d+) (.*)$")
return { "changing", now_ms, stored, tonumber(to), name }
