--- Keys: t.key
-- A linear hash table (Litwin, VLDB 1980) of marks in fields of a hash. A field is a bucket. When there are too many
-- marks, the next bucket in order is split in two. The table grows with its content, and no call pays for all of it.
-- Data dictionary:
--   prefix .. "0"...   bucket: marks of `width` bytes, oldest first, each starting with a digest of 8 bytes or more
-- Buckets are read once and changed in memory, until the script writes those in `changed`.
local function new_table(key, prefix, width, many)
  local _, exponent = math.frexp(many)
  return { key = key, prefix = prefix, width = width, buckets = many, base = 2 ^ (exponent - 1), held = {}, changed = {} }
end

-- Return the bucket of a digest. Buckets already split use one more bit.
local function bucket_of(t, digest)
  local a, b, c, d = string.byte(digest, 1, 4)
  local hash = ((a * 256 + b) * 256 + c) * 256 + d
  local at = hash % t.base
  return at < t.buckets - t.base and hash % (2 * t.base) or at
end

-- Return a bucket's marks. A bucket with a foreign layout sets the table's `problem`.
local function read_bucket(t, at)
  local held = t.held[at]
  if not held then
    held = not t.begun and redis.call("HGET", t.key, t.prefix .. at) or ""
    t.held[at] = held
    if #held % t.width ~= 0 then
      t.problem = t.key .. " holds a bucket of another layout: " .. t.prefix .. at
    end
  end
  return held
end

local function set_bucket(t, at, held)
  t.held[at], t.changed[at] = held, true
end

-- Return the position of the next mark of a digest from `from` on, or nil.
local function find_mark(t, held, digest, from)
  local at = string.find(held, digest, from, true)
  while at and at % t.width ~= 1 do
    at = string.find(held, digest, at + 1, true)
  end
  return at
end

-- Split the next bucket in order.
local function split_next(t)
  local from, to = t.buckets - t.base, t.buckets
  local held, stay, go = read_bucket(t, from), {}, {}
  t.buckets = t.buckets + 1
  for at = 1, #held, t.width do
    local one = string.sub(held, at, at + t.width - 1)
    local side = bucket_of(t, one) == from and stay or go
    side[#side + 1] = one
  end
  if t.buckets == 2 * t.base then
    t.base = t.buckets
  end
  set_bucket(t, from, table.concat(stay))
  set_bucket(t, to, table.concat(go))
end
