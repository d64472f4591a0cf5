--- @include "lib/buckets"
-- One page of a shard of a seen-set: a hash of the ids marked from `start` until `ends`, which expires as a whole. Data dictionary:
--   ""       MessagePack of {layout 1, start ms, ends ms, longest window of its marks ms, number of buckets}
--   "0"...   bucket (lib/buckets): marks of digest (8 bytes), units of time since `start` (4), check of its request (5), and, of a set
--            that keeps values, the value (17)
-- A unit is 1 ms, or more in a page that is open for over 49 days.
-- A bucket is full with 96 marks, or 48 that have values: fewer cost more memory, more cost more time.
local FULL = 96 * 17

local function opened(key, width, start, ends, window, many)
  local p = buckets(key, "", width, many)
  p.start, p.ends, p.window, p.unit = start, ends, window, math.floor((ends - start) / 4294967295) + 1
  return p
end

-- The page as it is stored; or nil and what is wrong with it. One that is not there has ended long ago.
local function page(key, width)
  local packed = redis.pcall("HGET", key, "")
  if not packed then
    return opened(key, width, -1, 0, 0, 1)
  end
  if packed.err then
    return nil, key .. " holds another type than a hash"
  end
  -- An array of 5, layout 1: what begins otherwise is somebody else's, and not for the unpacker.
  if string.find(packed, "^\149\1") then
    local whole, head = pcall(cmsgpack.unpack, packed)
    if whole and type(head[5]) == "number" then
      return opened(key, width, unpack(head, 2))
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
  local p = opened(gone.key, gone.width, now_ms, now_ms + math.max(window, young.window), window, math.ceil(young.buckets / 2))
  p.begun, p.over = true, gone.start >= 0
  return p
end

-- The younger page and the older one; or nil, nil and what is wrong with one of them.
local function pages(key, other, width)
  local young, problem = page(key, width)
  local old, second = page(other, width)
  if problem or second then
    return nil, nil, problem or second
  end
  if old.start > young.start then
    return old, young
  end
  return young, old
end

-- The same for who is going to mark ids: the younger page is one that takes them.
local function open_pages(key, other, width, window, now_ms)
  local young, old, problem = pages(key, other, width)
  if problem or young.ends > now_ms then
    return young, old, problem
  end
  return turned(old, young, window, now_ms), young, stray(young) or stray(old)
end

-- When the mark at this place of a bucket was made, ms.
local function made(p, held, at)
  local a, b, c, d = string.byte(held, at + 8, at + 11)
  return p.start + (((a * 256 + b) * 256 + c) * 256 + d) * p.unit
end

-- Whether a page has a mark of an id within the window: 1 one of this request, 0 another's, -1 none; and what was kept with it. A mark
-- counts for no longer than its page's window, as trim drops it then.
local function marked_in(p, digest, check, window, now_ms)
  local known, value = -1, ""
  if p.start < 0 then
    return known, value
  end
  local held, since = bucket(p, bucket_of(p, digest)), now_ms - math.min(window, p.window)
  local at = not p.problem and next_mark(p, held, digest, 1)
  while at and known < 1 do
    if made(p, held, at) > since then
      known = string.sub(held, at + 12, at + 16) == check and 1 or 0
      value = string.sub(held, at + 17, at + p.width - 1)
    end
    at = next_mark(p, held, digest, at + 1)
  end
  return known, value
end

-- The same of both pages: this request's own mark, else the latest.
local function marked(young, old, digest, check, window, now_ms)
  local known, value = marked_in(young, digest, check, window, now_ms)
  if known < 1 then
    local before, older = marked_in(old, digest, check, window, now_ms)
    if before > known then
      return before, older
    end
  end
  return known, value
end

-- Drops what is out of date from an id's bucket, once it is a quarter: else a page would hold all of its marks until the last is.
local function trim(p, digest, now_ms)
  local at, since, first = bucket_of(p, digest), now_ms - p.window, 1
  local held = bucket(p, at)
  if held == "" or p.problem or made(p, held, math.floor(#held / p.width / 4) * p.width + 1) > since then
    return
  end
  while first <= #held and made(p, held, first) <= since do
    first = first + p.width
  end
  change(p, at, string.sub(held, first))
end

-- Marks an id in the younger page; what is out of date beside it in the older one is dropped.
local function mark(young, old, digest, check, now_ms, value)
  local at, units = bucket_of(young, digest), math.ceil(math.max(0, now_ms - young.start) / young.unit)
  local time = string.char(math.floor(units / 16777216), math.floor(units / 65536) % 256, math.floor(units / 256) % 256, units % 256)
  local held = bucket(young, at) .. digest .. time .. check .. value
  change(young, at, held)
  if #held > FULL and bucket(young, young.buckets - young.base) and not young.problem then
    split(young)
    young.head = true
  end
  trim(old, digest, now_ms)
end

-- Writes what changed of a page. First a write that is refused when there is no memory.
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

-- Writes both. The younger page stays until its last mark can be out of date.
local function store_pages(young, old, window, now_ms)
  if next(young.changed) then
    if young.begun or window > young.window then
      young.window, young.head = math.max(window, young.window), true
    end
    store(young, now_ms)
    store(old, now_ms)
  end
end
