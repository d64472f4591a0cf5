--- @include "topics/lib/slot/budget"
--- @include "topics/lib/slot/lease_times"
-- Reclaim deliveries whose lease lapsed, at most 32, within the byte budget. A corrupt entry stops it: that one and the
-- ones behind it stay untouched. Return the remaining bytes, and the problem of the corrupt entry. The functions for it are
-- created only if a lease lapsed. `request` is the id of the request.
local function reclaim_lapsed(K, p, lease, now_ms, done, request)
  local until_now, problem = "(" .. lease_start(K, now_ms + 1), nil
  local lapsed = redis.call("ZRANGEBYSCORE", K.leases, "-inf", until_now, "LIMIT", 0, 32) -- fault: lapse-time
  if #lapsed == 0 then
    return max_call_bytes
  end
  --- @include "topics/lib/validate/slot"
  --- @include "topics/lib/slot/read_entries"
  --- @include "topics/lib/validate/stored"
  --- @include "topics/lib/schedule/requeue"
  --- @include "topics/lib/dead_letters"
  --- @include "topics/lib/slot/store_result"
  --- @include "topics/lib/slot/require_storing"
  --- @include "topics/lib/slot/history"
  local LAPSED = "lease lapsed: its worker vanished or stalled"

  -- Return when to retry a message whose lease lapsed: at once after the first lapse, later at a pseudo-random moment
  -- within one lease. Otherwise a poison message that kills its worker lapses together with the same neighbours, until
  -- all of them are dead.
  local function retry_time(key, token, m)
    if m.attempts + (tonumber(m.earlier) or 0) < 2 then
      return now_ms
    end
    local drawn = string.sub(redis.sha1hex(key .. token), 1, 8)
    return now_ms + tonumber(drawn, 16) % lease
  end

  -- Requeue or bury a delivery whose lease lapsed, and count it in `done`.
  local function reclaim_delivery(key)
    local function add_count(name, n)
      done[name] = (done[name] or 0) + n
    end
    local entry = parse_entry(read_entries(K, { key })[key])
    local m = delivered_message(K, key, entry)
    end_delivery(K, key)
    add_count("lapsed", 1)
    m.attempts = m.attempts + 1
    note_transition(K, "lapsed", key, entry.token, m)
    if entry.cancelled then
      add_count("cancelled", 1)
      add_count("cancelled_triggers", m.count)
      store_result(K, p, key, m, "c", now_ms)
      note_transition(K, "cancelled", key, entry.token, m)
      finish_delivery(K, p, key, m.group, true)
    elseif is_exhausted(p, m) then
      add_count("buried", 1)
      add_count("buried_triggers", m.count)
      add_dead_letter(K, key, m, LAPSED, tonumber(entry.token), now_ms)
      store_result(K, p, key, m, "d" .. LAPSED, now_ms)
      note_transition(K, "buried", key, entry.token, m)
      finish_delivery(K, p, key, m.group, true)
    else
      m.failure = LAPSED
      m.pinned = 0
      lower_priority(p, m)
      add_count("folded", requeue(K, p, key, m, retry_time(key, entry.token, m), reason.retry)) -- fault: lapse-requeue
    end
  end

  local accepted, room = count_within_budget(K, p, lapsed, max_call_bytes, "messages", "next")
  problem = validate_slot(K)
  for i = 1, problem and 0 or accepted do
    local key = lapsed[i]
    problem = validate_keys(K, p, { key })
    if problem then
      break
    end
    if i == 1 then
      require_storing(K)
    end
    reclaim_delivery(key)
  end
  if done.buried then
    discard_dead_letters(K, p, now_ms)
  end
  write_history(K, p, string.sub(request, 1, 8), now_ms)
  return room, problem
end
