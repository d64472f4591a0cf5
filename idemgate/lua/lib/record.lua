-- The record of one idempotency key: a string, the MessagePack of this array. Data dictionary, by place:
local record = {
  layout = 1, -- 1
  state = 2, -- "p" in progress, "d" done, "f" done with a stored failure, "r" released
  owner = 3, -- token of who acts; the request id of who decided or forgot
  fence = 4, -- fencing token, the last granted
  attempts = 5, -- started
  ends = 6, -- ms: of the lease in progress, else of the retention
  since = 7, -- ms: when the state was entered
  taken = 8, -- times taken over
  print = 9, -- fingerprint or ""
  data = 10, -- the result when done, a failure, else the checkpoint or ""
  kind = 11, -- of a result: "v" a value, "n" none was storable, "e" a failure; "" before
  lease = 12, -- ms; this and what follows only in progress
  held = 13, -- 1 = wait for a decision when the owner vanishes
  waited = 14, -- 1 = somebody waits for the end
}
