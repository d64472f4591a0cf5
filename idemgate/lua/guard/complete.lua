--- The work is done: keep the results (or failures) until retention ends, each by itself. Allowed after the lease lapsed, as long as
--- nobody took over. Replayed by the same tokens: the same answers.
--- KEYS[1..] records
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] kind of result: "v" a value, "n" none was storable, "e" a failure
--- ARGV[3..] four a record: owner token; its fencing token, by which a copy of the completion is known, and that of an earlier grant
---         completes nothing; retention, ms; result
--- Returns the answer, of several an array of them, which ends where 128 KiB have been read: those behind are left for another call
---         packed "k": kept {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fields"
--- @include "lib/record"
--- @include "lib/rewrite"
--- @include "lib/wake"
--- @include "lib/most_bytes"
local kind, now_us = ARGV[2], now(ARGV[1])
local now_ms, several, met, i, wrote = (now_us - now_us % 1000) / 1000, KEYS[2] and {}, 0, 0, false
local kept, span
repeat
  i = i + 1
  local at, key, answer = 4 * i - 1, KEYS[i], nil
  local state, had, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited = fields(redis.pcall("GET", key))
  local granted = fence == tonumber(ARGV[at + 1])
  if not state then
    answer = { "foreign", now_ms, had }
  elseif state == "p" and owner == ARGV[at] and granted then
    if kept ~= ARGV[at + 2] then
      kept, span = ARGV[at + 2], tonumber(ARGV[at + 2])
    end
    local done = record(kind == "e" and "f" or "d", kind, "", fence, attempts, taken, now_ms + span, now_ms, print, ARGV[at + 3])
    rewrite(key, done, kept, wrote)
    wrote = true
    wake(key, waited, owner)
    answer = "k"
  elseif had ~= "" and owner == "" and granted then
    answer = "k"
  else
    answer = { "lost", now_ms }
  end
  if not several then
    return answer
  end
  several[i], met = answer, met + #(data or "")
until i == #KEYS or met >= most_bytes
return several
