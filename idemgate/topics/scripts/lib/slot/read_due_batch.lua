--- @include "topics/lib/slot/budget"
-- Return the next due messages: their keys, their due times, and their members in the set that holds them.
local function next_due_messages(K, ranked, now_ms, most)
  local found, dues = {}, {}
  if ranked then
    --- @include "topics/lib/schedule/schedule"
    local members = redis.call("ZRANGE", K.ready, 0, most - 1)
    for i, member in ipairs(members) do
      dues[i], found[i] = parse_ready(member)
    end
    return found, dues, members
  end
  local scored = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
  for i = 1, #scored, 2 do
    local n = (i + 1) / 2
    found[n], dues[n] = scored[i], tonumber(scored[i + 1])
  end
  return found, dues, found
end

-- Read a batch of at most `most` due messages: `keys`, `dues` and `members` as `next_due_messages` returns them. The first `n`
-- of them fit into `bytes`; `messages` holds these, and `bytes` what remains. `full`: there may be more.
local function read_due_batch(K, p, ranked, now_ms, most, bytes)
  local batch = {}
  batch.keys, batch.dues, batch.members = next_due_messages(K, ranked, now_ms, most)
  batch.n, batch.bytes = count_within_budget(K, p, batch.keys, bytes, "messages")
  if batch.n > 0 then
    batch.full = batch.n == most or batch.n < #batch.keys
    batch.messages = redis.call("HMGET", K.messages, unpack(batch.keys, 1, batch.n))
  end
  return batch
end
