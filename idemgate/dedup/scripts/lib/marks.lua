--- @include "lib/buckets"
-- The marks of ids in the two pages of a shard.
local FULL = 96 * 17

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
