--- @include "lib/merge/payloads"
-- Merge the accumulators of two messages. Those of `first` and `last` stay packed; others are unpacked once.
local function merge_accumulators(spec, a, b)
  if spec.op == "last" then
    return b
  elseif spec.op == "first" then
    return a
  end
  a = type(a) == "table" and a or cmsgpack.unpack(a)
  return merge(spec, a, type(b) == "table" and b or cmsgpack.unpack(b))
end

-- Merge two messages of the same key, `old` being the older. Due time, attempts and reason stay those of `old`; the
-- caller decides.
local function merge_messages(spec, old, new)
  old.count = old.count + new.count
  old.first = math.min(old.first, new.first)
  old.last = math.max(old.last, new.last)
  old.serial = math.max(old.serial, new.serial)
  old.acc = merge_accumulators(spec, old.acc, new.acc)
  if new.version ~= "" then
    old.version = new.version
  end
  if new.priority ~= "" then
    old.priority = new.priority
  end
  old.group = new.group
  return old
end
