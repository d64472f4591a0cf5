--- Count the content of a closed slot, or delete it for good. A marker that the slot is closed stays for a day. It
--- rejects clients that still use the deleted topic.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] name of the change
--- ARGV[3] "1" = delete, "0" = count only
--- Returns {"ok", now ms, pending, in flight, dead} {"open", now ms} (another change closed or reopened it) {"foreign", now ms, problem}
--- Keys: history
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/validate/slot"
--- @include "topics/lib/validate/stored"
--- @include "topics/lib/slot/history"
local K = slot(KEYS)
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem, closed = validate_slot(K)
if problem and not closed then
  return { "foreign", now_ms, problem }
elseif closed ~= ARGV[2] then
  return { "open", now_ms }
end
local purged = redis.call("HGET", K.meta, "gone")
if purged then
  purged = unpack_table(purged)
  if not (purged and are_numbers(purged, { 1, 2, 3 })) then
    return { "foreign", now_ms, corrupt_entry(K.meta, "gone") }
  end
  return { "ok", now_ms, purged[1], purged[2], purged[3] }
end
local flying = redis.call("ZCARD", K.leases)
local found = { redis.call("HLEN", K.messages) - flying + redis.call("HLEN", K.next), flying, redis.call("ZCARD", K.dead) }
if ARGV[3] == "1" then
  for _, part in ipairs({ "scheduled", "messages", "next", "leases", "inflight", "dead", "dead_data", "meta", "dedup", "dedup_expiry", "ready", "group_active", "group_waiting" }) do
    redis.call("UNLINK", K[part])
  end
  local history = history_of(K)
  redis.pcall("UNLINK", history)
  redis.call("HSET", K.meta, "v", "closed " .. ARGV[2], "gone", cmsgpack.pack(found))
  redis.call("PEXPIRE", K.meta, 86400000)
end
return { "ok", now_ms, found[1], found[2], found[3] }
