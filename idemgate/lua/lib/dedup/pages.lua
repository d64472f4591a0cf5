--- @include "lib/dedup/buckets"
-- One page of a shard of a dedup set: a hash of the ids marked from `start` until `ends`. It expires as a whole. Data
-- dictionary:
--   ""       MessagePack of {layout 1, start ms, ends ms, longest window of its marks ms, number of buckets}
--   "0"...   bucket (lib/dedup/buckets): marks of digest (8 bytes), time units since `start` (4), check of its request (5),
--            and in a set with values the value (17)
-- A unit is 1 ms, or more in a page that is open for over 49 days. A bucket is full with 96 marks, or 48 with values:
-- fewer cost more memory, more cost more time.
local FULL = 96 * 17

local function new_page(key, width, start, ends, window, many)
  local p = new_table(key, "", width, many)
  p.start, p.ends, p.window, p.unit = start, ends, window, math.floor((ends - start) / 4294967295) + 1
  return p
end

-- Return the stored page, or nil and the problem. An absent page counts as one that ended long ago.
local function read_page(key, width)
  local packed = redis.pcall("HGET", key, "")
  if not packed then
    return new_page(key, width, -1, 0, 0, 1)
  end
  if packed.err then
    return nil, key .. " holds another type than a hash"
  end
  -- Only an array of 5 with layout 1 is unpacked: other data is foreign.
  if string.find(packed, "^\149\1") then
    local whole, head = pcall(cmsgpack.unpack, packed)
    if whole and type(head[5]) == "number" then
      return new_page(key, width, unpack(head, 2))
    end
  end
  return nil, key .. " holds a page of another layout"
end

-- Return a problem if an absent page's key holds a foreign hash. Checked when a page starts.
local function check_absent_page(p)
  local key = p.key
  if p.start < 0 and redis.call("EXISTS", key) == 1 then
    return key .. " holds a page of another layout"
  end
end

-- Start the page after `young`, replacing `gone`. It ends when every mark of `young` has expired. It starts with half
-- as many buckets, so it need not grow from one, and it shrinks when fewer ids arrive.
local function rotate_pages(gone, young, window, now_ms)
  local p = new_page(gone.key, gone.width, now_ms, now_ms + math.max(window, young.window), window, math.ceil(young.buckets / 2))
  p.begun, p.over = true, gone.start >= 0
  return p
end

-- Return the younger and the older page, or nil, nil and the problem.
local function read_pages(key, other, width)
  local young, problem = read_page(key, width)
  local old, second = read_page(other, width)
  if problem or second then
    return nil, nil, problem or second
  end
  if old.start > young.start then
    return old, young
  end
  return young, old
end

-- Return both pages for a writer, and start a new younger page if the current one has ended.
local function open_pages(key, other, width, window, now_ms)
  local young, old, problem = read_pages(key, other, width)
  if problem or young.ends > now_ms then
    return young, old, problem
  end
  return rotate_pages(old, young, window, now_ms), young, check_absent_page(young) or check_absent_page(old)
end

-- Return the time of the mark at this position of a bucket, ms.
local function marked_at(p, held, at)
  local a, b, c, d = string.byte(held, at + 8, at + 11)
  return p.start + (((a * 256 + b) * 256 + c) * 256 + d) * p.unit
end

-- Find an id within the window: 1 = marked by this request, 0 = by another, -1 = not marked; and the stored value. A
-- mark never outlives its page's window, because trim_bucket drops it then.
local function find_in_page(p, digest, check, window, now_ms)
  local known, value = -1, ""
  if p.start < 0 then
    return known, value
  end
  local held, since = read_bucket(p, bucket_of(p, digest)), now_ms - math.min(window, p.window)
  local at = not p.problem and find_mark(p, held, digest, 1)
  while at and known < 1 do
    if marked_at(p, held, at) > since then
      known = string.sub(held, at + 12, at + 16) == check and 1 or 0
      value = string.sub(held, at + 17, at + p.width - 1)
    end
    at = find_mark(p, held, digest, at + 1)
  end
  return known, value
end

-- Find an id in both pages: this request's own mark first, else the latest.
local function find_in_pages(young, old, digest, check, window, now_ms)
  local known, value = find_in_page(young, digest, check, window, now_ms)
  if known < 1 then
    local before, older = find_in_page(old, digest, check, window, now_ms)
    if before > known then
      return before, older
    end
  end
  return known, value
end

-- Drop expired marks from an id's bucket once a quarter have expired. Otherwise a page would hold all of its marks
-- until the last one expires.
local function trim_bucket(p, digest, now_ms)
  local at, since, first = bucket_of(p, digest), now_ms - p.window, 1
  local held = read_bucket(p, at)
  if held == "" or p.problem or marked_at(p, held, math.floor(#held / p.width / 4) * p.width + 1) > since then
    return
  end
  while first <= #held and marked_at(p, held, first) <= since do
    first = first + p.width
  end
  set_bucket(p, at, string.sub(held, first))
end

-- Mark an id in the younger page, and trim its bucket in the older page.
local function add_mark(young, old, digest, check, now_ms, value)
  local at, units = bucket_of(young, digest), math.ceil(math.max(0, now_ms - young.start) / young.unit)
  local time = string.char(math.floor(units / 16777216), math.floor(units / 65536) % 256, math.floor(units / 256) % 256, units % 256)
  local held = read_bucket(young, at) .. digest .. time .. check .. value
  set_bucket(young, at, held)
  if #held > FULL and read_bucket(young, young.buckets - young.base) and not young.problem then
    split_next(young)
    young.head = true
  end
  trim_bucket(old, digest, now_ms)
end

-- Write the changed buckets of a page. The first write is one that is refused when the server is out of memory.
local function store_page(p, now_ms)
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

-- Write both pages. The younger page lives until its last mark has expired.
local function store_pages(young, old, window, now_ms)
  if next(young.changed) then
    if young.begun or window > young.window then
      young.window, young.head = math.max(window, young.window), true
    end
    store_page(young, now_ms)
    store_page(old, now_ms)
  end
end
