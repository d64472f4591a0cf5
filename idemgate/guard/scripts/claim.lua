--- Claim keys, each independently: grant the right to run, or return why not. A retry with the same owner ids gets the
--- same answers.
--- KEYS[1..] records
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] fingerprint, or ""
--- ARGV[3] lifetime of a claimed record, ms: attempts and checkpoint outlive the lease
--- ARGV[4] terms, packed as >I6I4BB: lease, ms; maximum attempts, 0 = unlimited; 1 = hold the key if this owner dies;
---         1 = the caller will wait for the end; 2 = the caller has waited. It was answered "busy" before.
--- ARGV[5..] owner id, one a record
--- Returns one answer, or for several keys an array, which ends once 128 KiB were read: the rest needs another call
---         packed "s": started; then fence, attempt, times taken over as >I8I4I4; checkpoint or nothing
---         packed "d": done; then kind, fence, attempt, remaining retention ms as >c1I8I4I8; result
---         {"shared", now ms, attempt, failure}: the run failed for which the caller has waited
---         {"busy", now ms, remaining lease ms, attempt} {"reused", now ms} {"held", now ms, attempt} {"exhausted", now ms, attempts}
---         {"stale", now ms} (this owner id was released before) {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/fence"
--- @include "guard/lib/format"
local print, now_us = ARGV[2], now(ARGV[1])
local now_ms, answers, bytes_read, i = (now_us - now_us % 1000) / 1000, KEYS[2] and {}, 0, 0
local span, allowed, hold, wait
repeat
  i = i + 1
  local key, id, answer = KEYS[i], ARGV[i + 4], nil
  local state, kind, owner, last, attempts, taken, ends, since, known, data, lease, held, waited, cancelled, failure = unpack_record(redis.pcall("GET", key), key)
  local running = state == "p"
  if not running and state and ends <= now_ms then -- fault: record-lasts
    state, kind, attempts, taken, data, failure = "absent", "", 0, 0, "", nil
  end
  if not state then
    answer = { "foreign", now_ms, kind }
  elseif kind ~= "" then -- fault: done-again
    if known == print then
      answer = struct.pack(">c1c1I8I4I8", "d", kind, last, attempts, ends - now_ms) .. data
    else
      answer = { "reused", now_ms }
    end
  elseif owner == id and state ~= "absent" then -- fault: claim-copy
    if running then
      answer = struct.pack(">c1I8I4I4", "s", last, attempts, taken) .. data
    else
      answer = { "stale", now_ms }
    end
  elseif running and known ~= print then
    answer = { "reused", now_ms }
  else
    if not span then
      span, allowed, hold, wait = struct.unpack(">I6I4BB", ARGV[4])
    end
    local left = running and math.min(ends - now_ms, lease) or 0 -- as lib/lease_left: making the function costs each claim
    if left > 0 then -- fault: lease-runs
      local later, wanted = now_ms + left, wait > 0 and 1 or waited
      if wanted ~= waited or later ~= ends then
        -- If the clock jumped back, the lease restarts from now.
        local again = pack_record(state, kind, owner, last, attempts, taken, later, since, known, data, lease, held, wanted, cancelled)
        redis.call("SET", key, again, "KEEPTTL")
      end
      answer = { "busy", now_ms, left, attempts } -- fault: busy-until
    elseif running and held == 1 then -- fault: vanished-owner
      answer = { "held", now_ms, attempts }
    elseif failure and wait == 2 and known == print then -- fault: failure-shared
      answer = { "shared", now_ms, attempts, failure }
    elseif allowed > 0 and attempts >= allowed then
      answer = { "exhausted", now_ms, attempts }
    else
      last, attempts, taken = fence(last, now_us), attempts + 1, running and taken + 1 or taken -- fault: grant
      -- The first write is one that is refused when the server is out of memory: all or nothing.
      local begun = pack_record("p", "", id, last, attempts, taken, now_ms + span, now_ms, print, data, span, hold, 0) -- fault: begun
      redis.call("SET", key, begun, "PX", ARGV[3])
      answer = struct.pack(">c1I8I4I4", "s", last, attempts, taken) .. data
    end
  end
  if not answers then
    return answer
  end
  answers[i], bytes_read = answer, bytes_read + #(data or "")
until i == #KEYS or bytes_read >= max_call_bytes
return answers
