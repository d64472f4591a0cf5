--- @include "lib/slot/inflight"
--- @include "lib/schedule/requeue"
--- @include "lib/dead/dead_letters"
local LAPSED = "lease lapsed: its worker vanished or stalled"

-- Return when to retry a message whose lease lapsed: at once after the first lapse, later at a pseudo-random moment
-- within one lease. Otherwise a poison message that kills its worker lapses together with the same neighbours, until
-- all of them are dead.
local function retry_time(key, token, m, lease, now_ms)
  if m.attempts < 2 then
    return now_ms
  end
  local drawn = string.sub(redis.sha1hex(key .. token), 1, 8)
  return now_ms + tonumber(drawn, 16) % lease
end

-- Requeue or bury a delivery whose lease lapsed, and count it in `done`.
local function reclaim_delivery(K, p, key, lease, now_ms, done)
  local function add_count(name, n)
    done[name] = (done[name] or 0) + n
  end
  local entry = parse_entry(redis.call("HGET", K.inflight, key))
  local m = delivered_message(K, key, entry)
  end_delivery(K, key)
  add_count("lapsed", 1)
  m.attempts = m.attempts + 1
  if entry.cancelled then
    add_count("cancelled", 1)
    add_count("cancelled_triggers", m.count)
    finish_delivery(K, p, key, m.group)
  elseif m.attempts >= p.attempts then
    add_count("buried", 1)
    add_count("buried_triggers", m.count)
    add_dead_letter(K, key, m, LAPSED, tonumber(entry.token), now_ms)
    finish_delivery(K, p, key, m.group)
  else
    m.failure = LAPSED
    m.pinned = 0
    add_count("folded", requeue(K, p, key, m, retry_time(key, entry.token, m, lease, now_ms), reason.retry))
  end
end
