-- Return how many messages may be delivered, and when the slot opens again: 0 = open now, a time in ms, or nil = when a
-- delivery ends. The rate is a generic cell rate algorithm (GCRA): the theoretical arrival time may run ahead of the
-- clock by at most the burst.
local function count_permitted(K, want, wanted, paused, rate, now_us)
  if paused then
    return 0, nil
  end
  if want.flights > 0 then
    local room = want.flights - redis.call("HLEN", K.inflight)
    if room <= 0 then
      return 0, nil
    end
    wanted = math.min(wanted, room)
  end
  if want.interval > 0 then
    local ahead, burst = math.max(rate, now_us), want.burst * want.interval
    local room = math.max(0, math.floor((now_us + burst - ahead) / want.interval))
    if room < wanted then
      return room, math.ceil((ahead + want.interval * (room + 1) - burst) / 1000)
    end
  end
  return wanted, 0
end
