--- @include "lib/now"
--- @include "topics/lib/schedule/due_times"
-- Accept one trigger of a key without a message, the most frequent single call, and return the reply. It has neither a
-- version nor an event id. Return nil and the key's message, if there is one, for anything else: a copy of a request, the
-- first one of a half minute, foreign data. Then nothing was written, and the other paths decide. It is as short as it can
-- be: in a single call each function and table that a script creates costs as much as a command. `args` are the arguments
-- of the script.
local function accept_one(K, p, now_ms, args)
  local time, extension = args[5], ""
  if string.byte(time) == 0x96 then -- packed options (topics/lib/trigger/accept_any)
    local at, priority, group, version, event, trace = unpack(cmsgpack.unpack(time), 1, 6)
    if version ~= "" or event ~= "" then
      return nil
    end
    if priority .. group .. trace ~= "" then
      local traces = trace ~= "" and { 0, trace } or nil
      extension = cmsgpack.pack({ 0, "", "", priority, group, 0, "", traces and "", traces })
      extension = struct.pack(">I4", #extension) .. extension
    end
    time = at
  end
  local key, stored = args[7], redis.call("HGET", K.messages, args[7])
  if stored then
    return nil, stored
  end
  local id, half = string.sub(args[2], 3, 16), math.floor(now_ms / 30000)
  local meta, log = redis.call("HMGET", K.meta, "v", "accepted"), redis.call("HMGET", K.replies[half % 2], "", id)
  local serial = (tonumber(meta[2]) or 0) + 1
  local usual = meta[1] == "3" and serial > 0 and serial < 9007199254740992 and serial % 64 > 0
  if not usual or tonumber(log[1]) ~= half or log[2] or redis.call("HGET", K.replies[(half + 1) % 2], id) then
    return nil
  end
  local header, due, score = prepare_new(p, parse_time(time, now_ms), serial, now_ms, extension ~= "")
  local message, is_earliest = header .. extension .. args[8], redis.call("ZCOUNT", K.scheduled, "-inf", score) == 0
  if #message > 1024 then -- see track_large
    return nil
  end
  -- @allow ZADD
  -- The first write is one that is refused when the server is out of memory: all or nothing.
  redis.call("HSET", K.meta, "accepted", digits(serial))
  redis.call("ZADD", K.scheduled, score, key) -- before the message: if an ACL denies it, the other paths find none
  redis.call("HSET", K.messages, key, message)
  if is_earliest then
    redis.pcall("PUBLISH", K.scheduled, score)
  end
  local reply = { "ok", now_ms - half * 30000, 8 * (due - now_ms), 1 }
  if p.results then
    table.insert(reply, 3, serial - 1)
  end
  redis.call("HSET", K.replies[half % 2], id, cmsgpack.pack(reply))
  reply[2] = now_ms
  return reply
end
