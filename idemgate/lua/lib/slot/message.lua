-- Indexes of a message, which is an array. Times are in ms. `why` names what made it due. `pinned` is 1 if the caller
-- set the time. `attempts` counts deliveries so far. `acc` is the accumulator of the merge policy. `failure` is the
-- text of the last failure. `priority` and `group` are "" for none. `serial` numbers its newest trigger within the
-- slot, so two messages of one key differ. `splits` counts partial retries. `rank`, absent for none, is the text by
-- which it last waited for its group in a topic with priorities.
local message = {
  count = 1, first = 2, last = 3, due = 4, attempts = 5, why = 6, pinned = 7, version = 8, acc = 9, failure = 10,
  priority = 11, group = 12, serial = 13, splits = 14, rank = 15,
}
