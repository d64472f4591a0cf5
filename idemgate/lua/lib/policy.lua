-- What this program says a topic is, a packed map. Times in ms; what is not limited is missing:
--   window quiet max_delay max_size leading   when a message is due
--   merge raw                                 how payloads merge (lib/merge); raw = accumulators are not packed
--   remember                                  how long event ids and versions are remembered
--   attempts retention max_dead               deliveries of a message; age and number of dead letters
--   ranked boost                              it has priorities; how much time a priority is worth, missing = strict
--   group_limit                               deliveries of one group at a time
--   limited                                   there is a limit on what is in flight at a time
local function policy(packed)
  return cmsgpack.unpack(packed)
end
