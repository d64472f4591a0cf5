-- The record of one idempotency key as it is stored: a string that begins as no text in UTF-8 does. Numbers are big-endian.
-- Its fields, as lib/fields and lib/read give them:
--   state     "p" in progress, "d" done, "f" done with a stored failure, "r" released
--   kind      of a result: "v" a value, "n" none was storable, "e" a failure (state "f"); "" before
--   owner     token of who acts; the request id of who decided or forgot; "" once a completion was stored: it is known by its fence
--   fence     fencing token, the last granted; attempts  started; taken  times taken over
--   ends      ms: of the lease in progress, else of the retention; since  ms: when the state was entered
--   print     fingerprint or ""; data  the result when done, a failure, else the checkpoint or ""
--   lease     ms; held  1 = wait for a decision when the owner vanishes; waited  1 = somebody waits for the end; in progress only
-- Whatever it says, the long form can: byte 193, state or kind, numbers, owner and fingerprint with their lengths, data.
-- What is done at the first attempt, most records, has a short form that leaves out what can be told: byte 248, 250, 252 (completed, of
-- kind "v", "n", "e") or 254 (marked, its owner's token follows); 1 more where a fingerprint follows; then fence, ms from the microsecond
-- that the fence says until it was done, minutes of retention.
local function record(state, kind, owner, fence, attempts, taken, ends, since, print, data, lease, held, waited)
  if kind ~= "" and attempts == 1 and taken == 0 then
    local after, minutes = since - (fence - fence % 1000) / 1000, (ends - since) / 60000
    if after >= 0 and after < 65536 and minutes % 1 == 0 and minutes < 65536 and (owner == "" or kind == "n" and #owner == 16)
      and (print == "" or #print == 16) then
      local code = owner ~= "" and 254 or kind == "v" and 248 or kind == "n" and 250 or 252
      return struct.pack(">BI7I2I2", print == "" and code or code + 1, fence, after, minutes) .. owner .. print .. data
    end
  end
  return struct.pack(">Bc1I7I6I6I4I4I6BBc0Bc0", 193, kind == "" and state or kind, fence, ends, since, attempts, taken,
    lease or 0, (held or 0) + 2 * (waited or 0), #owner, owner, #print, print) .. data
end
