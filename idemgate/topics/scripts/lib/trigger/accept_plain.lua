--- @include "lib/now"
--- @include "topics/lib/slot/add_entries"
--- @include "topics/lib/schedule/due_times"
-- Accept triggers without options but times, the path of most calls: create messages, or merge into those whose packed
-- header tells all (merge_packed). Return the reply. Return nil if any trigger needs `accept_any`: then nothing was
-- written. `t.args` are the arguments of the script, because a copy of them takes time: `t.given` keys from the 7th on,
-- then as many accumulators. What only merges need is created when a key has a message or occurs twice.
local function accept_plain(t)
  local K, p, now_ms, n, given, args = t.K, t.p, t.now_ms, t.n, t.given, t.args
  t.stored = t.stored or redis.call("HMGET", K.messages, unpack(args, 7, 6 + n))
  local stored, serial, merges = t.stored, t.last_serial + n, not t.distinct
  for i = 1, n do
    merges = merges or stored[i]
  end
  local merge_one, merging, places, in_flight
  if merges then
    if p.ranked or redis.call("EXISTS", K.ready) == 1 then
      return nil
    end
    --- @include "topics/lib/trigger/read_stored"
    --- @include "topics/lib/trigger/merge_packed"
    read_stored(t)
    merge_one, merging, in_flight = merge_packed, new_merging(t, serial), t.in_flight
    places = merging.places
  end
  local times, time, reply, last = t.times, t.options, { "ok", now_ms }, 2
  local words, size, scheduled, moved, large, earliest = {}, 0, {}, 0, false, math.huge
  local prefix, new_due, new_score, new_code, score, code, last_code
  for i = 1, n do
    local key, place, m = args[6 + i], nil, nil
    if not prefix or times and times[i] ~= time then
      time = times and times[i] or time
      prefix, new_due, new_score = prepare_new(p, parse_time(time, now_ms), serial, now_ms)
      new_code = 8 * (new_due - now_ms)
      score, code = new_score, new_code
      earliest = not merges and new_due < earliest and new_due or earliest
    end
    if merges then
      place = places[key]
      local old, due, old_due = place and words[place] or stored[i], new_due, nil
      score, code = new_score, new_code
      if old then
        if time == "" then
          m, due, old_due = merge_one(t, merging, key, old, args[6 + given + i])
        end
        if not m then
          return nil
        end
        merging.merged, score, code = merging.merged + 1, due ~= old_due and due, 8 * (due - now_ms) + 1
      end
      places[key] = place or size + 2
      score = not in_flight[key] and score -- fault: in-flight
      earliest = score and due < earliest and due or earliest
    end
    m = m or prefix .. args[6 + given + i]
    if place then
      words[place] = m
    else
      words[size + 1], words[size + 2], size = key, m, size + 2
    end
    large = large or #m > 1024
    if score then
      scheduled[moved + 1], scheduled[moved + 2], moved = score, key, moved + 2
    end
    if code == last_code then
      reply[last] = reply[last] + 1
    else
      reply[last + 1], reply[last + 2], last, last_code = code, 1, last + 2, code
    end
  end
  for key, acc in pairs(merging and merging.sums or {}) do
    local m = words[places[key]] .. cmsgpack.pack(acc)
    words[places[key]], large = m, large or #m > 1024
  end
  local is_earliest = moved > 0 and redis.call("ZCOUNT", K.scheduled, "-inf", digits(earliest)) == 0
  local nexts = {}
  if in_flight and next(in_flight) then
    local all, all_size = words, size
    words, size = {}, 0 -- only those whose keys are not in flight
    for i = 1, all_size, 2 do
      local key, m = all[i], all[i + 1]
      if in_flight[key] then
        nexts[#nexts + 1], nexts[#nexts + 2] = key, m
      else
        words[size + 1], words[size + 2], size = key, m, size + 2
      end
    end
  end
  -- @allow HDEL PEXPIRE UNLINK ZADD ZRANGEBYSCORE ZREM ZSCORE
  -- The first write is one that is refused when the server is out of memory: all or nothing.
  redis.call("HSET", K.meta, "v", "3", "accepted", digits(serial))
  if merging and merging.merged > 0 then
    redis.call("HSET", K.meta, "merged", digits(merging.before + merging.merged))
  end
  if large then -- see track_large
    redis.call("HSET", K.meta, "large", "1")
  end
  add_entries(K.messages, words, size, K.scheduled, scheduled, moved)
  if #nexts > 0 then
    redis.call("HSET", K.next, unpack(nexts))
  end
  if is_earliest then
    redis.pcall("PUBLISH", K.scheduled, digits(earliest))
  end
  return reply
end
