-- A linear hash table (Litwin, VLDB 1980) of marks in fields of a hash: a field is a bucket, and the next bucket in turn is split in two
-- when there are too many marks. So the table grows with what is in it, and no call pays for all of it. Data dictionary:
--   prefix .. "0"...   bucket: marks of `width` bytes, oldest first, each beginning with a digest of 8 bytes or more
-- What is read is kept, and changed there, until the script writes what is in `changed`.
local function buckets(key, prefix, width, many)
  local _, exponent = math.frexp(many)
  return { key = key, prefix = prefix, width = width, buckets = many, base = 2 ^ (exponent - 1), held = {}, changed = {} }
end

-- Which bucket a digest belongs to. Those that were split already use one bit more of it.
local function bucket_of(t, digest)
  local a, b, c, d = string.byte(digest, 1, 4)
  local hash = ((a * 256 + b) * 256 + c) * 256 + d
  local at = hash % t.base
  return at < t.buckets - t.base and hash % (2 * t.base) or at
end

-- A bucket's marks. One that was not written by us is a `problem` of the table.
local function bucket(t, at)
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

local function change(t, at, held)
  t.held[at], t.changed[at] = held, true
end

-- Where a bucket has the next mark of a digest, from there on; nil when it has none.
local function next_mark(t, held, digest, from)
  local at = string.find(held, digest, from, true)
  while at and at % t.width ~= 1 do
    at = string.find(held, digest, at + 1, true)
  end
  return at
end

-- Splits the next bucket in turn.
local function split(t)
  local from, to = t.buckets - t.base, t.buckets
  local held, stay, go = bucket(t, from), {}, {}
  t.buckets = t.buckets + 1
  for at = 1, #held, t.width do
    local one = string.sub(held, at, at + t.width - 1)
    local side = bucket_of(t, one) == from and stay or go
    side[#side + 1] = one
  end
  if t.buckets == 2 * t.base then
    t.base = t.buckets
  end
  change(t, from, table.concat(stay))
  change(t, to, table.concat(go))
end
