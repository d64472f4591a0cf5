--- Finish a change of the slot count: it is done, given up, or the topic is deleted.
--- KEYS[1] topics
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] topic name
--- ARGV[3] name of the change
--- ARGV[4] "done" | "forgotten" | "given up"
--- ARGV[5] policy expected in the registry; a different one changes nothing
--- ARGV[6] policy to store
--- Returns {"ok", now ms} {"differs", now ms, policy} {"foreign", now ms, problem}
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
local kind = redis.call("TYPE", KEYS[1]).ok
if kind ~= "hash" and kind ~= "none" then
  return { "foreign", now_ms, "holds a " .. kind .. ", expected a hash" }
end
local to, was = ARGV[2] .. " to", ARGV[2] .. " was"
if string.match(redis.call("HGET", KEYS[1], to) or "", "^%d+ (.*)$") ~= ARGV[3] then
  return { "ok", now_ms }
end
local stored = redis.call("HGET", KEYS[1], ARGV[2])
if not stored then
  return { "foreign", now_ms, "has no policy of topic " .. ARGV[2] .. ", whose slot count is being changed" }
elseif ARGV[4] == "done" and stored ~= ARGV[5] then
  return { "differs", now_ms, stored }
end
redis.call("HDEL", KEYS[1], to)
if ARGV[4] == "done" then
  local slots = tostring(cmsgpack.unpack(stored).slots)
  local known = redis.call("HGET", KEYS[1], was) or ""
  if not string.find(" " .. known .. " ", " " .. slots .. " ", 1, true) then
    redis.call("HSET", KEYS[1], was, known == "" and slots or known .. " " .. slots)
  end
  redis.call("HSET", KEYS[1], ARGV[2], ARGV[6])
elseif ARGV[4] == "forgotten" then
  redis.call("HDEL", KEYS[1], ARGV[2], was)
end
return { "ok", now_ms }
