--- Make pending messages due now: those of one key, or of the slot, soonest first: at most 500, then what stands behind deliveries of
--- their keys, which is due when these end: at most as many as one page of the leases names, and 128 KiB of them or one.
--- KEYS[1..14] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] request id
--- ARGV[3] key, or "" for all
--- ARGV[4] of all: "", or the page of the leases at which a call before this left off, or "last": once more the schedule, into which
---         deliveries that ended between two calls have put what stood behind them
--- ARGV[5..] keys of the page before it that that call left
--- Returns {"ok", now ms, moved, left (of all: how many are still due later), then of all: "", or what the next call says as ARGV[4..]} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "lib/digits"
--- @include "lib/slot"
--- @include "lib/wrong"
--- @include "lib/sound"
--- @include "lib/told"
--- @include "lib/tell"
--- @include "lib/message"
--- @include "lib/head"
--- @include "lib/hint"
--- @include "lib/lean"
--- @include "lib/most_bytes"
local K, key = slot(KEYS), ARGV[3]
local now_ms = math.floor(now(ARGV[1]) / 1000)
local problem = wrong(K)
if problem then
  return { "foreign", now_ms, problem }
end
local given = told(K, ARGV[2], now_ms)
if given then
  return given
end
local later, page = "(" .. string.format("%.0f", now_ms), ARGV[4]
local last = page == "last"
local soon = key == "" and (page == "" or last) and redis.call("ZCOUNT", K.due, later, "+inf")
-- What stands behind deliveries, as much of it as goes: `behind`; the rest of its page.
local behind, rest = {}, {}
if key ~= "" then
  problem = broken(K, nil, { key })
elseif not last and (not soon or soon <= 500) then
  local names, room = { unpack(ARGV, 5) }, most_bytes
  if #names == 0 then
    local found = redis.call("ZSCAN", K.lease, page ~= "" and page or "0", "COUNT", 100)
    page = found[1]
    for i = 1, #found[2], 2 do
      names[#names + 1] = found[2][i]
    end
  end
  for _, one in ipairs(names) do
    local size = redis.call("HSTRLEN", K.pending, one)
    if size > 0 and #behind > 0 and size > room or #rest > 0 then
      rest[#rest + 1] = one
    elseif size > 0 then
      behind[#behind + 1], room = one, room - size
      problem = problem or not lean_message(redis.call("HGET", K.pending, one)) and unsound(K.pending, one)
    end
  end
  if page == "0" and #rest == 0 then
    page = soon and "" or "last"
  end
end
if problem then
  return { "foreign", now_ms, problem }
end

-- Rewrites one message as due now. Returns how many that were.
local function hasten(one)
  local packed = redis.call("HGET", K.pending, one)
  -- What stands before the accumulator is made anew, and all else left as it is.
  local front = packed and { cmsgpack.unpack_limit(packed, message.acc - 1, 1) }
  if not front or (tonumber(redis.call("ZSCORE", K.due, one)) or front[1 + message.due]) <= now_ms then
    return 0
  end
  front[1 + message.due], front[1 + message.why] = now_ms, "flush"
  redis.call("HDEL", K.pending, one)
  local made = string.sub(packed, 1, 1) .. cmsgpack.pack(unpack(front, 2, message.acc)) .. string.sub(packed, front[1] + 1)
  redis.call("HSET", K.pending, one, made)
  return 1
end

local before, moved = head(K), 0
if key ~= "" then
  moved = hasten(key)
  if moved == 1 and redis.call("HEXISTS", K.flight, key) == 0 then
    redis.call("ZADD", K.due, now_ms, key)
    hint(K, before, now_ms)
  end
  return tell(K, ARGV[2], now_ms, { "ok", now_ms, moved, 0 })
end
if soon then
  for _, one in ipairs(redis.call("ZRANGEBYSCORE", K.due, later, "+inf", "LIMIT", 0, 500)) do
    -- The message is not rewritten: take and trigger see that the two times differ.
    redis.call("ZADD", K.due, now_ms, one)
    moved = moved + 1
  end
  if moved > 0 then
    -- Their messages have other times now, and no trigger that is numbered above these.
    local facts = redis.call("HMGET", K.facts, "accepted", "flushed")
    redis.call("HSET", K.facts, "flushed", digits(math.max(tonumber(facts[1]) or 0, tonumber(facts[2]) or 0)))
  end
  hint(K, before, moved > 0 and now_ms or nil)
end
local left = (soon or 0) - moved
if last and left == 0 then
  page = ""
end
for _, one in ipairs(behind) do
  moved = moved + hasten(one)
end
return tell(K, ARGV[2], now_ms, { "ok", now_ms, moved, left, page, unpack(rest) })
