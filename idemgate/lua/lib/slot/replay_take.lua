--- @include "lib/digits"
--- @include "lib/slot/header"
--- @include "lib/slot/inflight"
--- @include "lib/schedule/next_due"
-- Return the deliveries of an earlier take that it still owns.
local function replay_take(K, known, now_ms)
  local token, reply = digits(known[3]), { "ok", now_ms, next_due(K, now_ms, 0), known[2], 0 }
  for _, key in ipairs(known[1]) do
    local entry, packed = redis.call("HGET", K.inflight, key), redis.call("HGET", K.messages, key)
    local d, flags, _, due = entry and parse_entry(entry), read_header(packed)
    if d and flags and d.token == token then
      local n = #reply
      reply[5], reply[n + 1], reply[n + 2], reply[n + 3] = known[3], key, d.due or due, packed
    end
  end
  return reply
end
