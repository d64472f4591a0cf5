--- Release claims, so that the next callers may run. A tombstone per key keeps attempts, checkpoint and token. It
--- prevents a delayed claim of this owner from locking the key again. If a caller waits, it also keeps the failure for
--- the callers that have waited, until the next claim. A retry with the same owner ids gets the same answers.
--- KEYS[1..] records
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = they count as no attempts: undo their count
--- ARGV[3..] three a record: owner id; lifetime of the tombstone, ms; failure to share, or ""
--- Returns one answer, or for several keys an array, which ends once 128 KiB were read: the rest needs another call
---         {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/format"
--- @include "guard/lib/replace_record"
local undone, now_us = ARGV[2] == "1" and 1 or 0, now(ARGV[1])
local now_ms, answers, bytes_read, i, wrote = (now_us - now_us % 1000) / 1000, KEYS[2] and {}, 0, 0, false
repeat
  i = i + 1
  local at, key, answer = 3 * i, KEYS[i], nil
  local state, kind, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited = unpack_record(redis.pcall("GET", key), key)
  if not state then
    answer = { "foreign", now_ms, kind }
  elseif state == "p" and owner == ARGV[at] then -- fault: releases
    local keep, failure = ARGV[at + 1], waited == 1 and ARGV[at + 2] or "" -- fault: failure-kept
    local shown = failure == "" and "" or print -- only callers with this payload get the failure
    local released = pack_record("r", "", owner, fence, attempts - undone, taken, now_ms + tonumber(keep), now_ms, shown, failure .. data, #failure) -- fault: released
    replace_record(key, released, keep, wrote) -- fault: tombstone
    wrote = true
    notify_waiters(key, waited, owner)
    answer = { "ok", now_ms }
  elseif state == "r" and owner == ARGV[at] then -- fault: release-copy
    answer = { "ok", now_ms }
  else
    answer = { "lost", now_ms }
  end
  if not answers then
    return answer
  end
  answers[i], bytes_read = answer, bytes_read + #(data or "")
until i == #KEYS or bytes_read >= max_call_bytes
return answers
