-- One page of a shard of a seen-set: a hash of the ids marked from `start` until `ends`, which expires as a whole. Data dictionary:
--   ""       MessagePack of {layout 1, start ms, ends ms, longest window of its marks ms, number of buckets}
--   "0"...   bucket: marks of 17 bytes, oldest first: digest (8), units of time since `start` (4), check of its request (5)
-- A unit is 1 ms, or more in a page that is open for over 49 days.
-- The buckets are a linear hash table (Litwin, VLDB 1980): when a mark makes a bucket too full, the next one in turn is split in two. So
-- a page grows with its ids, and no call pays for all of it. 96 marks: fewer cost more memory, more cost more time.
local WIDTH, FULL = 17, 96 * 17

local function opened(key, start, ends, window, buckets)
  local _, exponent = math.frexp(buckets)
  return { key = key, start = start, ends = ends, window = window, unit = math.floor((ends - start) / 4294967295) + 1,
    buckets = buckets, base = 2 ^ (exponent - 1), held = {}, changed = {} }
end

-- The page as it is stored; or nil and what is wrong with it. One that is not there has ended long ago.
local function page(key)
  local packed = redis.pcall("HGET", key, "")
  if not packed then
    return opened(key, -1, 0, 0, 1)
  end
  if packed.err then
    return nil, key .. " holds another type than a hash"
  end
  -- An array of 5, layout 1: what begins otherwise is somebody else's, and not for the unpacker.
  if string.find(packed, "^\149\1") then
    local whole, head = pcall(cmsgpack.unpack, packed)
    if whole and type(head[5]) == "number" then
      return opened(key, unpack(head, 2))
    end
  end
  return nil, key .. " holds a page of another layout"
end

-- What is wrong with a page that is not there: a hash that is not ours. Asked when a page is begun.
local function stray(p)
  local key = p.key
  if p.start < 0 and redis.call("EXISTS", key) == 1 then
    return key .. " holds a page of another layout"
  end
end

-- The page after `young`, in place of the one before it. It ends when all marks of `young` are out of date. It begins with half as many
-- buckets: it need not grow anew, and shrinks where fewer ids come.
local function turned(gone, young, window, now_ms)
  local p = opened(gone.key, now_ms, now_ms + math.max(window, young.window), window, math.ceil(young.buckets / 2))
  p.begun, p.over = true, gone.start >= 0
  return p
end

-- Which bucket a digest belongs to. Those that were split already use one bit more of it.
local function bucket_of(p, digest)
  local a, b, c, d = string.byte(digest, 1, 4)
  local hash = ((a * 256 + b) * 256 + c) * 256 + d
  local at = hash % p.base
  return at < p.buckets - p.base and hash % (2 * p.base) or at
end

local function bucket(p, at)
  local key, held = p.key, p.held[at]
  if not held then
    held = not p.begun and redis.call("HGET", key, at) or ""
    p.held[at] = held
    if #held % WIDTH ~= 0 then
      p.problem = key .. " holds a bucket of another layout"
    end
  end
  return held
end

local function change(p, at, held)
  p.held[at], p.changed[at] = held, true
end

-- When the mark at this place of a bucket was made, ms.
local function made(p, held, at)
  local a, b, c, d = string.byte(held, at + 8, at + 11)
  return p.start + (((a * 256 + b) * 256 + c) * 256 + d) * p.unit
end

-- Whether an id has a mark within the window: 1 one of this request, 0 another's, -1 none. A mark counts for no longer than its page's
-- window, as trim drops it then.
local function marked(p, digest, check, window, now_ms)
  local known = -1
  if p.start < 0 then
    return known
  end
  local held, since = bucket(p, bucket_of(p, digest)), now_ms - math.min(window, p.window)
  local at = string.find(held, digest, 1, true)
  while at and known < 1 do
    if at % WIDTH == 1 and made(p, held, at) > since then
      known = string.sub(held, at + 12, at + 16) == check and 1 or 0
    end
    at = string.find(held, digest, at + 1, true)
  end
  return known
end

local function split(p)
  local from, to = p.buckets - p.base, p.buckets
  local held, stay, go = bucket(p, from), {}, {}
  p.buckets, p.head = p.buckets + 1, true
  for at = 1, #held, WIDTH do
    local one = string.sub(held, at, at + WIDTH - 1)
    local side = bucket_of(p, one) == from and stay or go
    side[#side + 1] = one
  end
  if p.buckets == 2 * p.base then
    p.base = p.buckets
  end
  change(p, from, table.concat(stay))
  change(p, to, table.concat(go))
end

local function mark(p, digest, check, now_ms)
  local at, units = bucket_of(p, digest), math.ceil(math.max(0, now_ms - p.start) / p.unit)
  local time = string.char(math.floor(units / 16777216), math.floor(units / 65536) % 256, math.floor(units / 256) % 256, units % 256)
  local held = bucket(p, at) .. digest .. time .. check
  change(p, at, held)
  if #held > FULL then
    split(p)
  end
end

-- Drops what is out of date from an id's bucket, once it is a quarter: else a page would hold all of its marks until the last is.
local function trim(p, digest, now_ms)
  local at, since, first = bucket_of(p, digest), now_ms - p.window, 1
  local held = bucket(p, at)
  if held == "" or made(p, held, math.floor(#held / WIDTH / 4) * WIDTH + 1) > since then
    return
  end
  while first <= #held and made(p, held, first) <= since do
    first = first + WIDTH
  end
  change(p, at, string.sub(held, first))
end

-- A page stays until its last mark can be out of date.
local function outlast(p, window)
  if p.begun or window > p.window then
    p.window, p.head = math.max(window, p.window), true
  end
end

-- Writes what changed. First a write that is refused when there is no memory.
local function store(p, now_ms)
  local key, fields = p.key, {}
  local head = p.head and cmsgpack.pack({ 1, p.start, p.ends, p.window, p.buckets })
  for at in pairs(p.changed) do
    fields[#fields + 1] = at
    fields[#fields + 1] = p.held[at]
  end
  if p.over then
    redis.call("HSET", key, "", head)
    redis.call("UNLINK", key)
  end
  if #fields > 0 then
    redis.call("HSET", key, unpack(fields))
  end
  if head then
    redis.call("HSET", key, "", head)
    redis.call("PEXPIRE", key, p.ends + p.window - now_ms)
  end
end
