-- Places in a message, an array. Times in ms; `why` is what made it due; `pinned` = 1 when its time was named by the caller;
-- `attempts` counts deliveries so far; `acc` is the accumulator of the merge policy; `failure` the last failure's text; `priority` is "" where none
-- was named, `group` is "" for none; `serial` numbers its newest trigger within the slot, so that no two messages of a key are taken for the same;
-- `splits` is how often only some of its items were tried again; `rank`, missing for none, the text by which it last stood in the line of its group,
-- in a topic with priorities.
local message = {
  count = 1, first = 2, last = 3, due = 4, attempts = 5, why = 6, pinned = 7, version = 8, acc = 9, failure = 10,
  priority = 11, group = 12, serial = 13, splits = 14, rank = 15,
}
