--- Make pending messages due now: the one of a key, or those of the slot, soonest first. A call moves at most 500
--- scheduled messages. Then it moves messages behind deliveries of their keys, which become due when those end. These
--- are limited to one page of the leases, and to 128 KiB or a single message.
--- KEYS[1..15] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] key, or "" for all
--- ARGV[4] for all: "", or the cursor of the leases from the previous call, or "last": read the schedule once more, since
---         deliveries settled between two calls have added to it
--- ARGV[5..] keys of the previous page that are still to be moved
--- Returns {"ok", now ms, moved, left (for all: number still due later), then for all: "" when done, or ARGV[4..] of the next call}
---         {"foreign", now ms, problem}
--- Keys: hash
--- @include "lib/now"
--- @include "topics/lib/slot/slot"
--- @include "topics/lib/slot/early_reply"
--- @include "topics/lib/schedule/schedule"
--- @include "topics/lib/schedule/hints"
local K, key = slot(KEYS), ARGV[3]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local known_reply = early_reply(K, ARGV[2], now_ms)
if known_reply then
  return known_reply
end
local problem
local later, page = "(" .. string.format("%.0f", now_ms), ARGV[4]
local last = page == "last"
local soon = key == "" and (page == "" or last) and redis.call("ZCOUNT", K.scheduled, later, "+inf")
-- `behind`: messages behind deliveries that fit the budget; `rest`: the remaining keys of the page.
local behind, rest = {}, {}
if key ~= "" then
  problem = validate_keys(K, nil, { key })
elseif not last and (not soon or soon <= 500) then
  local names, room = { unpack(ARGV, 5) }, max_call_bytes
  if #names == 0 then
    local found = redis.call("ZSCAN", K.leases, page ~= "" and page or "0", "COUNT", 100)
    page = found[1]
    for i = 1, #found[2], 2 do
      names[#names + 1] = found[2][i]
    end
  end
  for _, one in ipairs(names) do
    local size = redis.call("HSTRLEN", K.next, one)
    if size > 0 and #behind > 0 and size > room or #rest > 0 then
      rest[#rest + 1] = one
    elseif size > 0 then
      behind[#behind + 1], room = one, room - size
      problem = problem or not read_header(redis.call("HGET", K.next, one)) and corrupt_entry(K.next, one)
    end
  end
  if page == "0" and #rest == 0 then
    page = soon and "" or "last"
  end
end
if problem then
  return { "foreign", now_ms, problem }
end

-- Rewrite one message as due now. Return the number of messages rewritten.
local function make_due(one)
  local hash = pending_hash(K, one)
  local packed = redis.call("HGET", hash, one)
  local flags, _, due = read_header(packed)
  -- A message that is not behind a delivery and not in the schedule is due already: in the ready set, or waiting for its
  -- group. Its time may be above the clock, because a clock may step back.
  local at = hash == K.next and due or tonumber(redis.call("ZSCORE", K.scheduled, one))
  if not flags or not at or at <= now_ms then
    return 0
  end
  redis.call("HSET", hash, one, with_due(packed, now_ms, reason.flush))
  return 1
end

-- Start with HDEL: a server without memory refuses a script whose first write may allocate.
redis.call("HDEL", K.meta, "")
local before, moved = earliest_due(K), 0
if key ~= "" then
  moved = make_due(key)
  if moved == 1 and not redis.call("ZSCORE", K.leases, key) then
    redis.call("ZADD", K.scheduled, now_ms, key)
    publish_hint(K, before, now_ms)
  end
  return remember_reply(K, ARGV[2], now_ms, { "ok", now_ms, moved, 0 })
end
if soon then
  for _, one in ipairs(redis.call("ZRANGEBYSCORE", K.scheduled, later, "+inf", "LIMIT", 0, 500)) do
    -- The message is not rewritten: take and trigger detect that the two times differ.
    redis.call("ZADD", K.scheduled, now_ms, one)
    moved = moved + 1
  end
  if moved > 0 then
    -- These messages have other times now, up to this serial.
    local meta = redis.call("HMGET", K.meta, "accepted", "flushed")
    redis.call("HSET", K.meta, "flushed", digits(math.max(tonumber(meta[1]) or 0, tonumber(meta[2]) or 0)))
  end
  publish_hint(K, before, moved > 0 and now_ms or nil)
end
local left = (soon or 0) - moved
if last and left == 0 then
  page = ""
end
for _, one in ipairs(behind) do
  moved = moved + make_due(one)
end
return remember_reply(K, ARGV[2], now_ms, { "ok", now_ms, moved, left, page, unpack(rest) })
