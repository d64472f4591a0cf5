--- Complete keys, each independently: store the results or failures until retention ends. It is allowed after the
--- lease lapsed, as long as no other owner took over. A retry with the same owner ids gets the same answers.
--- KEYS[1..] records
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] kind of result: "v" a value, "n" no storable value, "e" a failure
--- ARGV[3..] four a record: owner id; its fencing token, which identifies a retry and rejects an earlier grant; retention, ms;
---         result
--- Returns one answer, or for several keys an array, which ends once 128 KiB were read: the rest needs another call
---         packed "k": stored {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/format"
--- @include "guard/lib/replace_record"
local kind, now_us = ARGV[2], now(ARGV[1])
local now_ms, answers, bytes_read, i, wrote = (now_us - now_us % 1000) / 1000, KEYS[2] and {}, 0, 0, false
local kept, span
repeat
  i = i + 1
  local at, key, answer = 4 * i - 1, KEYS[i], nil
  local state, had, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited = unpack_record(redis.pcall("GET", key), key)
  local granted = fence == tonumber(ARGV[at + 1])
  if not state then
    answer = { "foreign", now_ms, had }
  elseif state == "p" and owner == ARGV[at] and granted then -- fault: completes
    if kept ~= ARGV[at + 2] then
      kept, span = ARGV[at + 2], tonumber(ARGV[at + 2])
    end
    local done = pack_record(kind == "e" and "f" or "d", kind, "", fence, attempts, taken, now_ms + span, now_ms, print, ARGV[at + 3]) -- fault: done-record
    replace_record(key, done, kept, wrote)
    wrote = true
    notify_waiters(key, waited, owner)
    answer = "k"
  elseif had ~= "" and owner == "" and granted then -- fault: completion-copy
    answer = "k"
  else
    answer = { "lost", now_ms }
  end
  if not answers then
    return answer
  end
  answers[i], bytes_read = answer, bytes_read + #(data or "")
until i == #KEYS or bytes_read >= max_call_bytes
return answers
