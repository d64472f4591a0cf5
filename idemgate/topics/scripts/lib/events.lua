--- Keys: t.key
--- @include "lib/buckets"
--- @include "lib/now"
--- @include "topics/lib/validate/stored"
-- The event ids that a slot remembers: a table of marks within its dedup hash. Data dictionary:
--   "e"       MessagePack of {layout 1, number of buckets, number of marks}
--   "e0"...   bucket (lib/buckets): marks of the digest of event id and key (16 bytes), slot hash (2), expiry, ms (6)
-- Scripts receive an event id as the first 18 bytes of a mark. A bucket has 6 to 14 marks on average. More marks
-- would save a byte of memory per id, but cost more to write, log and replicate. Writing a bucket drops its expired
-- marks.
local WIDTH, FEW, MANY = 24, 6, 14

-- Load the table of event ids. `problem` is set if it is corrupt.
local function load_events(K)
  local packed = redis.call("HGET", K.dedup, "e")
  local head = not packed and { 1, 1, 0 } or unpack_table(packed) or {}
  local whole = are_numbers(head, { 1, 2, 3 }) and head[1] == 1 and head[2] >= 1
  local e = new_table(K.dedup, "e", WIDTH, whole and head[2] or 1)
  e.count, e.problem = head[3], not whole and corrupt_entry(K.dedup, "e") or nil
  return e
end

-- Return the expiry of the mark at this position of a bucket, ms.
local function expires_at(held, at)
  local a, b, c, d, e, f = string.byte(held, at + 18, at + 23)
  return ((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f
end
local function pack_ms(number)
  local high, low = math.floor(number / 16777216), number % 16777216
  return string.char(math.floor(high / 65536), math.floor(high / 256) % 256, high % 256,
    math.floor(low / 65536), math.floor(low / 256) % 256, low % 256)
end

-- Read the bucket of an event and return true if it is valid. Call it before the first write.
local function check_bucket(e, at)
  return not e.problem and read_bucket(e, at) and not e.problem
end
local function has_event(e, id, now_ms)
  local held = read_bucket(e, bucket_of(e, id))
  local at = find_mark(e, held, string.sub(id, 1, 16), 1)
  return at ~= nil and expires_at(held, at) > now_ms
end

-- Replace a bucket's marks and update the count.
local function replace_bucket(e, at, held)
  e.count = e.count + (#held - #e.held[at]) / WIDTH
  set_bucket(e, at, held)
end
local function drop_expired(held, now_ms)
  local kept = {}
  for at = 1, #held, WIDTH do
    if expires_at(held, at) > now_ms then
      kept[#kept + 1] = string.sub(held, at, at + WIDTH - 1)
    end
  end
  return table.concat(kept)
end

-- Merge the last bucket into the one it was split from.
local function merge_last_bucket(e, now_ms)
  local last = e.buckets - 1
  local base = last < e.base and e.base / 2 or e.base
  if check_bucket(e, last) and check_bucket(e, last - base) then
    local held = drop_expired(e.held[last], now_ms) .. drop_expired(e.held[last - base], now_ms)
    replace_bucket(e, last, "")
    replace_bucket(e, last - base, held)
    e.buckets, e.base = last, base
  end
end

-- Store an event until `expires`, or longer if a later expiry is stored. Drop expired marks if the oldest one has
-- expired, and at every eighth mark.
local function add_event(e, id, expires, now_ms)
  local at = bucket_of(e, id)
  local held = read_bucket(e, at)
  local known = find_mark(e, held, string.sub(id, 1, 16), 1)
  if known then
    expires = math.max(expires, expires_at(held, known))
    held = string.sub(held, 1, known - 1) .. string.sub(held, known + WIDTH)
  end
  if held ~= "" and (#held % (8 * WIDTH) == 0 or expires_at(held, 1) <= now_ms) then
    held = drop_expired(held, now_ms)
  end
  replace_bucket(e, at, held .. id .. pack_ms(math.min(expires, 281474976710655)))
  if e.count > MANY * e.buckets and check_bucket(e, e.buckets - e.base) then
    split_next(e)
  elseif e.count < FEW * e.buckets and e.buckets > 1 then
    merge_last_bucket(e, now_ms)
  end
end

-- Let the dedup hash live for `ms` more at least. It gets an eighth and a minute more, so that few calls write the
-- expiry. The sorted set lives a second longer: without it no call would find the expired facts of the hash. Call it
-- after the last write to them. `facts`: the caller wrote to the sorted set.
local function extend_lifetime(K, ms, facts)
  local left = redis.call("PTTL", K.dedup)
  if left < ms then
    left = math.min(ms + math.floor(ms / 8) + 60000, 281474976710655)
    redis.call("PEXPIRE", K.dedup, digits(left))
    redis.call("PEXPIRE", K.dedup_expiry, digits(left + 1000))
  elseif facts and redis.call("PTTL", K.dedup_expiry) < left then
    redis.call("PEXPIRE", K.dedup_expiry, digits(left + 1000))
  end
end

-- Write the changed buckets. It must not be the first write of a script: a server out of memory would refuse that
-- one.
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
