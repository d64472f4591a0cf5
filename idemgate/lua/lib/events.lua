--- @include "lib/buckets"
--- @include "lib/sound"
-- The event ids that a slot remembers: a table of marks within its memo. Data dictionary:
--   "e"       MessagePack of {layout 1, number of buckets, number of marks}
--   "e0"...   bucket (lib/buckets): marks of the digest of event id and key (16 bytes), what decides their slot (2), when to forget, ms (6)
-- An event id, as scripts get it, is the first 18 bytes of a mark. A bucket has 6 to 14 marks on average: more would save a
-- byte of memory an id, and each would cost more to write, log and replicate. What is out of date goes when its bucket is written.
local WIDTH, FEW, MANY = 24, 6, 14

-- What is remembered; `problem` says what is wrong with it.
local function events(K)
  local packed = redis.call("HGET", K.memo, "e")
  local head = not packed and { 1, 1, 0 } or unpacked(packed) or {}
  local whole = numbers(head, { 1, 2, 3 }) and head[1] == 1 and head[2] >= 1
  local e = buckets(K.memo, "e", WIDTH, whole and head[2] or 1)
  e.count, e.problem = head[3], not whole and unsound(K.memo, "e") or nil
  return e
end

-- When to forget the mark at this place of a bucket, ms.
local function forgotten_at(held, at)
  local a, b, c, d, e, f = string.byte(held, at + 18, at + 23)
  return ((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f
end
local function six_bytes(number)
  local high, low = math.floor(number / 16777216), number % 16777216
  return string.char(math.floor(high / 65536), math.floor(high / 256) % 256, high % 256,
    math.floor(low / 65536), math.floor(low / 256) % 256, low % 256)
end

-- Reads the bucket of an event. Whether it is sound: ask before the first write.
local function readable(e, at)
  return not e.problem and bucket(e, at) and not e.problem
end
local function witnessed(e, id, now_ms)
  local held = bucket(e, bucket_of(e, id))
  local at = next_mark(e, held, string.sub(id, 1, 16), 1)
  return at ~= nil and forgotten_at(held, at) > now_ms
end

-- A bucket with other marks, which are counted.
local function recount(e, at, held)
  e.count = e.count + (#held - #e.held[at]) / WIDTH
  change(e, at, held)
end
local function fresh(held, now_ms)
  local kept = {}
  for at = 1, #held, WIDTH do
    if forgotten_at(held, at) > now_ms then
      kept[#kept + 1] = string.sub(held, at, at + WIDTH - 1)
    end
  end
  return table.concat(kept)
end

-- Puts the last bucket back to the one that it was split from.
local function unsplit(e, now_ms)
  local last = e.buckets - 1
  local base = last < e.base and e.base / 2 or e.base
  if readable(e, last) and readable(e, last - base) then
    local held = fresh(e.held[last], now_ms) .. fresh(e.held[last - base], now_ms)
    recount(e, last, "")
    recount(e, last - base, held)
    e.buckets, e.base = last, base
  end
end

-- Remembers an event until then, or for longer where it is. As its oldest mark shows, or at every eighth, a bucket is looked through.
local function witness(e, id, expires, now_ms)
  local at = bucket_of(e, id)
  local held = bucket(e, at)
  local known = next_mark(e, held, string.sub(id, 1, 16), 1)
  if known then
    expires = math.max(expires, forgotten_at(held, known))
    held = string.sub(held, 1, known - 1) .. string.sub(held, known + WIDTH)
  end
  if held ~= "" and (#held % (8 * WIDTH) == 0 or forgotten_at(held, 1) <= now_ms) then
    held = fresh(held, now_ms)
  end
  recount(e, at, held .. id .. six_bytes(math.min(expires, 281474976710655)))
  if e.count > MANY * e.buckets and readable(e, e.buckets - e.base) then
    split(e)
  elseif e.count < FEW * e.buckets and e.buckets > 1 then
    unsplit(e, now_ms)
  end
end

-- Writes what changed; not as the first write of a script, which one without memory would refuse.
local function store_events(t)
  local words = {}
  for at in pairs(t.changed) do
    if t.held[at] == "" then
      redis.call("HDEL", t.key, "e" .. at)
    else
      words[#words + 1] = "e" .. at
      words[#words + 1] = t.held[at]
    end
  end
  if next(t.changed) then
    redis.call("HSET", t.key, "e", cmsgpack.pack({ 1, t.buckets, t.count }), unpack(words))
  end
end
