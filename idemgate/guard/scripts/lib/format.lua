-- Return the fields of the record stored in `key` as separate values, which is cheaper than a table. Their order is that
-- of the parameters of pack_record, then the shared failure of a released record, or nil. A missing key (false) returns
-- state "absent". A foreign value returns nil and the problem.
local function unpack_record(stored, key)
  if not stored then
    return "absent", "", "", 0, 0, 0, 0, 0, "", ""
  end
  if stored.err then
    --- @include "lib/raise_refusal"
    raise_refusal(stored.err)
    return nil, "holds another type than a string"
  end
  local code, length = string.byte(stored), #stored
  if code == 193 then
    local whole, letter, fence, ends, since, attempts, taken, lease, flags, owner, print, at =
      pcall(struct.unpack, ">xc1I7I6I6I4I4I6BBc0Bc0", stored)
    if whole and at <= length + 1 then
      if letter == "p" or letter == "r" then
        local rest, data, failure = (flags - flags % 2) / 2, at > length and "" or string.sub(stored, at), nil
        if letter == "r" and lease > 0 then
          data, failure = string.sub(data, lease + 1), string.sub(data, 1, lease)
        end
        return letter, "", owner, fence, attempts, taken, ends, since, print, data, lease, flags % 2, rest % 2, (rest - rest % 2) / 2, failure
      elseif letter == "v" or letter == "n" or letter == "e" then
        return letter == "e" and "f" or "d", letter, owner, fence, attempts, taken, ends, since, print, string.sub(stored, at)
      end
    end
  elseif code and code >= 248 and length >= 12 then
    local fence, after, minutes, at = struct.unpack(">xI7I2I2", stored)
    local since, kind, owner, print = (fence - fence % 1000) / 1000 + after, "v", "", ""
    if code >= 250 then
      kind = (code == 252 or code == 253) and "e" or "n"
    end
    if code >= 254 then
      owner, at = string.sub(stored, at, at + 15), at + 16
    end
    if code % 2 == 1 then
      print, at = string.sub(stored, at, at + 15), at + 16
    end
    if at <= length + 1 then
      return kind == "e" and "f" or "d", kind, owner, fence, 1, 0, since + minutes * 60000, since, print, string.sub(stored, at)
    end
  elseif code == 192 or code and code >= 245 and code < 248 then -- fault: plain-record
    --- @include "guard/lib/plain_record"
    return unpack_plain(code, stored, key)
  end
  return nil, "holds a record of another layout"
end

-- Pack the record of one idempotency key. The string starts with a byte that no UTF-8 text starts with. Numbers are
-- big-endian. Its fields, as unpack_record and read_record return them:
--   state     "p" in progress, "d" done, "f" done with a stored failure, "r" released
--   kind      kind of result: "v" a value, "n" no storable value, "e" a failure (state "f"); "" before completion
--   owner     owner id; the request id after a forced decision; "" after a completion, which is identified by its fence
--   fence     last fencing token granted; attempts  attempts started; taken  times taken over
--   ends      ms: lease end while in progress, else retention end; since  ms: time of the last state change
--   print     fingerprint or ""; data  the result when done, a failure, else the checkpoint or ""
--   lease     ms; held  1 = wait for a decision if the owner dies; waited  1 = a caller waits for the end;
--   cancelled 1 = the owner is asked to stop; these four in progress only. The lease of a released record is the length
--             of the shared failure, which stands before the checkpoint
-- The long form holds any record. It starts with byte 193 and the state or kind. Then come the numbers. Owner and
-- fingerprint follow with their lengths. The data is last.
-- The short form is for keys done at the first attempt, which most are. It starts with byte 248, 250 or 252
-- (completed, of kind "v", "n" or "e"), or 254 (marked; the owner id follows). Add 1 if a fingerprint follows.
-- Then come the fence, the ms from the fence's time until completion, and the retention in minutes.
local function pack_record(state, kind, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited, cancelled)
  if kind ~= "" and attempts == 1 and taken == 0 then -- fault: short-form
    local after, minutes = since - (fence - fence % 1000) / 1000, (ends - since) / 60000
    if after >= 0 and after < 65536 and minutes % 1 == 0 and minutes < 65536 and (owner == "" or kind == "n" and #owner == 16)
      and (print == "" or #print == 16) then
      local code = owner ~= "" and 254 or kind == "v" and 248 or kind == "n" and 250 or 252
      return struct.pack(">BI7I2I2", print == "" and code or code + 1, fence, after, minutes) .. owner .. print .. data -- fault: short-print
    end
  end
  return struct.pack(">Bc1I7I6I6I4I4I6BBc0Bc0", 193, kind == "" and state or kind, fence, ends, since, attempts, taken,
    lease or 0, (held or 0) + 2 * (waited or 0) + 4 * (cancelled or 0), #owner, owner, #print, print) .. data
end
