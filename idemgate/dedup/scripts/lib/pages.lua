--- Keys: key
--- @include "lib/buckets"
-- One page of a shard of a dedup set: a hash of the ids marked from `start` until `ends`. It expires as a whole. Data
-- dictionary:
--   ""       MessagePack of {layout 1, start ms, ends ms, longest window of its marks ms, number of buckets}
--   "0"...   bucket (lib/buckets): marks of digest (8 bytes), time units since `start` (4), check of its request (5),
--            and in a set with values the value (17)
-- A unit is 1 ms, or more in a page that is open for over 49 days. A bucket is full with 96 marks, or 48 with values:
-- fewer cost more memory, more cost more time.
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
    --- @include "lib/raise_refusal"
    raise_refusal(packed.err)
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
