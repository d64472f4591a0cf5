--- Keys: from
--- @include "topics/lib/slot/counters"
--- @include "topics/lib/slot/add_entries"
-- Write the deliveries of a batch, and remove what it moved from the set `from`. `entries` and `leases` have `size` values.
local function write_batch(K, from, batch, entries, leases, size, moved)
  add_entries(K.inflight, entries, size, K.leases, leases, size)
  if batch.waiting and #batch.waiting > 0 then
    redis.call("HSET", K.messages, unpack(batch.waiting))
    redis.call("ZADD", K.group_waiting, unpack(batch.waiting_members))
  end
  if #moved > 0 then
    redis.call("ZREM", from, unpack(moved))
  end
end

-- Record what a take delivered: its last token, the longest lease, the number of messages, the time of the rate limit.
local function record_take(K, want, token_text, taken, meta, rate, now_us)
  local longest, delivered = tonumber(meta[3]) or 0, count_of(meta[7])
  local words = { "fence", token_text, "lease", digits(math.max(want.lease, longest)), "taken", digits(delivered + taken) }
  if want.interval > 0 then
    words[7], words[8] = "rate", digits(math.max(rate, now_us) + taken * want.interval)
  end
  redis.call("HSET", K.meta, unpack(words))
end
