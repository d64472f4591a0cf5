--- Give rights back: the next callers may run. Leaves of each a tombstone that keeps attempts, checkpoint and token, so that a late
--- copy of this owner's claim cannot lock the key again. Replayed by the same tokens: the same answers.
--- KEYS[1..] records
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] "1" = the attempts were never started: undo their count
--- ARGV[3..] two a record: owner token; how long the tombstone stays, ms
--- Returns the answer, of several an array of them, which ends where 128 KiB have been read: those behind are left for another call
---         {"ok", now ms} {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fields"
--- @include "lib/record"
--- @include "lib/rewrite"
--- @include "lib/wake"
--- @include "lib/most_bytes"
local undone, now_us = ARGV[2] == "1" and 1 or 0, now(ARGV[1])
local now_ms, several, met, i, wrote = (now_us - now_us % 1000) / 1000, KEYS[2] and {}, 0, 0, false
repeat
  i = i + 1
  local at, key, answer = 2 * i + 1, KEYS[i], nil
  local state, kind, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited = fields(redis.pcall("GET", key))
  if not state then
    answer = { "foreign", now_ms, kind }
  elseif state == "p" and owner == ARGV[at] then
    local keep = ARGV[at + 1]
    rewrite(key, record("r", "", owner, fence, attempts - undone, taken, now_ms + tonumber(keep), now_ms, "", data), keep, wrote)
    wrote = true
    wake(key, waited, owner)
    answer = { "ok", now_ms }
  elseif state == "r" and owner == ARGV[at] then
    answer = { "ok", now_ms }
  else
    answer = { "lost", now_ms }
  end
  if not several then
    return answer
  end
  several[i], met = answer, met + #(data or "")
until i == #KEYS or met >= most_bytes
return several
