--- @include "lib/validate/problems"
--- @include "lib/schedule/due_by_policy"
--- @include "lib/trigger/pending"
-- Return the functions that merging and deduplication need. They are defined on the first call: creating a function costs
-- about as much as querying a key. Most single triggers need none. The files above are shared with other steps of the
-- script. So they are included outside of the function.
local merging
local function load_merging()
  if not merging then
--- @include "lib/trigger/dedup"
--- @include "lib/trigger/merge_trigger"
--- @include "lib/validate/stored"
    merging = {
      check_dedup = check_dedup, remember_trigger = remember_trigger, validate_dedup = validate_dedup, store_events = store_events,
      merge_trigger = merge_trigger, validate_message = validate_message, validate_group = validate_group,
      unpack_table = unpack_table, is_accumulator = is_accumulator, merge = merge,
    }
  end
  return merging
end
