-- Unpack the topic policy sent by the client, a packed map. Times are in ms; an absent field means no limit:
--   window quiet max_delay max_size leading   when a message is due
--   merge raw                                 how payloads merge (lib/merge/payloads); raw = accumulators are not packed
--   remember                                  how long event ids and versions are stored
--   attempts retention max_dead               deliveries per message; age and number of dead letters
--   ranked boost                              the topic has priorities; time that one priority is worth, absent = strict
--   group_limit                               concurrent deliveries per group
--   limited                                   the number of deliveries in flight is limited
local function policy(packed)
  return cmsgpack.unpack(packed)
end
