--- Begin to change the slot count of a topic, or to delete it. A change under way is continued.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- ARGV[3] new slot count, 0 = delete the topic
--- ARGV[4] name of this change, which is stored in the slots that it closes
--- ARGV[5..] two a command: one that the change needs; a key of the topic that it is for
--- Returns {"refused", now ms, command} (the ACL denies it; nothing was written; Redis before 7.0 cannot check)
---         {"absent", now ms} {"same", now ms, policy} {"changing", now ms, policy, new slot count, name of the change}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/validate/parse_reshard_mark"
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
if not whole or type(policy) ~= "table" or not parse_reshard_mark(mark, redis.call("HGET", KEYS[1], ARGV[2] .. " was")) then
  return { "foreign", now_ms, "holds a corrupt policy or slot count of topic " .. ARGV[2] }
end
if not mark and policy.slots == tonumber(ARGV[3]) then
  return { "same", now_ms, stored }
end
-- Redis 8.10 checks a command only if it has the right number of arguments.
local function is_allowed(command, key)
  for _, words in ipairs({ { key }, {}, { key, "1" }, { key, "1", "1" }, { key, "1", "1", "1" } }) do
    local looked, answer = pcall(redis.acl_check_cmd, command, unpack(words))
    if looked then
      return answer
    end
  end
  return true
end

-- A change denied midway would leave slots closed. So a user who lacks one of its commands must not begin.
for i = 5, redis.acl_check_cmd and #ARGV or 0, 2 do
  if not is_allowed(ARGV[i], ARGV[i + 1]) then
    return { "refused", now_ms, ARGV[i] }
  end
end
if not mark then
  mark = ARGV[3] .. " " .. ARGV[4]
  redis.call("HSET", KEYS[1], ARGV[2] .. " to", mark)
end
local to, name = string.match(mark, "^(%d+) (.*)$")
return { "changing", now_ms, stored, tonumber(to), name }
