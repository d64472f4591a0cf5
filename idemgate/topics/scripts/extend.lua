--- Renew the leases of deliveries from now on (heartbeat). Idempotent.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] lease, ms
--- ARGV[3..] two a delivery: key; fencing token
--- Returns {"ok", now ms, then one a delivery: "ok" | "cancelled" (still held, not retried) | "lost"}
---         {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "lib/problems"
--- @include "topics/lib/validate/run_steps"
--- @include "topics/lib/slot/inflight"
--- @include "topics/lib/slot/read_entries"
--- @include "topics/lib/slot/move_leases"
local K, lease = slot(KEYS), tonumber(ARGV[2])
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
-- The last token records the latest known time. With it, take detects a clock that jumped back. The longest lease is
-- stored for the time when all have ended.
local function note_times(last, longest)
  redis.call("HSET", K.meta, "fence", digits(math.max(last, now_us - 1)), "lease", digits(math.max(longest, lease)))
end

local function steps()
  local meta = redis.call("HMGET", K.meta, "v", "fence", "lease", "term")
  local last, longest = tonumber(meta[2]) or 0, tonumber(meta[3]) or 0
  local problem = check_layout(K, meta[1]) or corrupt_number(K.meta, "fence", last) or corrupt_number(K.meta, "lease", longest)
    or corrupt_number(K.meta, "term", tonumber(meta[4]) or 0)
  if problem then
    return { "foreign", now_ms, problem }
  end
  local keys, tokens, reply = {}, {}, { "ok", now_ms }
  for i = 3, #ARGV, 2 do
    keys[#keys + 1], tokens[#tokens + 1] = ARGV[i], ARGV[i + 1]
  end
  local held, entries, stored = {}, {}, nil
  if #keys > 0 then
    entries, stored = read_entries(K, keys, tokens)
  end
  for i, key in ipairs(keys) do
    local entry = entries[key]
    local d = entry and parse_entry(entry)
    if entry and not d then
      return { "foreign", now_ms, corrupt_entry(K.inflight, key) }
    end
    if d and d.token == tokens[i] then -- fault: extend-token
      held[#held + 1] = key
      reply[#reply + 1] = d.cancelled and "cancelled" or "ok"
    else
      reply[#reply + 1] = "lost"
    end
  end
  if #held > 0 then
    move_leases(K, held, entries, stored, now_ms + lease)
    note_times(last, longest)
  end
  return reply
end
return run_steps(K, now_ms, steps)
