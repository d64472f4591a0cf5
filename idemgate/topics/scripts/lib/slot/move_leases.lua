--- @include "topics/lib/slot/add_entries"
--- @include "topics/lib/slot/lease_times"
-- Let the leases of deliveries end at `ends`, ms. Those without an entry (`stored`, see read_entries) get one.
local function move_leases(K, keys, entries, stored, ends)
  local start, starts, added = lease_start(K, ends), {}, {}
  for i, key in ipairs(keys) do
    starts[2 * i - 1], starts[2 * i] = start, key
    if not (stored and stored[key]) then
      added[#added + 1], added[#added + 2] = key, entries[key]
    end
  end
  -- No effect: a server without memory refuses a script whose first write may allocate, and leases must survive that.
  redis.call("ZREM", K.leases, "")
  add_entries(K.inflight, added, #added, K.leases, starts, #starts) -- fault: moved
end
