--- Keys: hash
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/slot/message"
--- @include "topics/lib/payloads"
-- Return true if no item is lost when a message joins the pending one of its key, as `fold` merges them. Writes nothing.
local function fits_pending(K, p, key, m)
  local op, hash = p.merge.op, pending_hash(K, key)
  local packed = (op == "append" or op == "union" or op == "fields") and redis.call("HGET", hash, key)
  if not packed then
    return true
  end
  local waiting = decode_message(packed)
  local newer = waiting.last > m.last or waiting.last == m.last and waiting.serial > m.serial
  local _, lost = merge_accumulators(p.merge, newer and m.acc or waiting.acc, newer and waiting.acc or m.acc)
  return lost == 0
end
