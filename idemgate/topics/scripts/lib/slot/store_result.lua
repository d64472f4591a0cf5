--- Keys: page
--- @include "lib/now"
-- Results of deliveries, for callers that wait for them. Only topics with the policy's `results` store any. Each of two hashes
-- holds the results of one period of `results` ms. When a period begins, its hash is deleted. So a result is stored for one to
-- two periods. Fields of a hash:
--   ""       number of the period
--   "k" key  packed array of the key's newest results, at most 8 and 128 KiB: {floor, serial, first ms, last ms, result} each.
-- A result covers the triggers of its message. Their serials are above `floor`, the serial of the key's message before it, and at
-- most `serial`. They were accepted from `first` to `last`.
-- The first byte of a result is its kind:
--   "v"  an encoded value follows
--   "n"  the value is not stored; the reason follows
--   "d"  the message is a dead letter; its failure follows
--   "c"  the message was cancelled

-- Store the result of a message that ended, and wake the callers that wait for it. Call it after the first write. `floor` is the
-- serial of the key's message in flight if the message waited behind it.
local function store_result(K, p, key, m, result, now_ms, floor)
  if not K.results then
    return
  end
  local period = math.floor(now_ms / p.results)
  local page, name = K.results[period % 2], "k" .. key
  local found = redis.call("HMGET", page, "", name)
  if tonumber(found[1]) ~= period then
    redis.call("UNLINK", page)
    redis.call("HSET", page, "", digits(period))
    redis.call("PEXPIRE", page, 2 * p.results + 60000)
    found[2] = false
  end
  local whole, stored = pcall(cmsgpack.unpack, found[2] or "")
  stored = whole and type(stored) == "table" and stored or {}
  floor = floor or 0
  for _, former in ipairs(stored) do
    local serial = type(former) == "table" and former[2]
    if type(serial) ~= "number" then
      stored = {} -- not a list of results
      break
    end
    floor = serial < m.serial and serial > floor and serial or floor
  end
  stored[#stored + 1] = { floor, m.serial, m.first, m.last, result }
  while #stored > 8 do
    table.remove(stored, 1)
  end
  local packed = cmsgpack.pack(stored)
  while #packed > max_call_bytes and #stored > 1 do
    table.remove(stored, 1)
    packed = cmsgpack.pack(stored)
  end
  redis.call("HSET", page, name, packed)
  -- without the slot: callers listen to it across a change of the number of slots
  K.ended = K.ended or string.gsub(K.results[0], ":%d+/%d+}:results0$", "}:result:")
  redis.pcall("PUBLISH", K.ended .. key, "")
end
