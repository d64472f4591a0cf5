--- @include "lib/merge/payloads"
--- @include "lib/slot/message"
-- Merge two messages of the same key, `old` being the older. Due time, attempts and reason stay those of `old`; the
-- caller decides.
local function merge_messages(spec, old, new)
  old[message.count] = old[message.count] + new[message.count]
  old[message.first] = math.min(old[message.first], new[message.first])
  old[message.last] = math.max(old[message.last], new[message.last])
  old[message.serial] = math.max(old[message.serial], new[message.serial])
  old[message.acc] = merge(spec, old[message.acc], new[message.acc])
  if new[message.version] ~= "" then
    old[message.version] = new[message.version]
  end
  if new[message.priority] ~= "" then
    old[message.priority] = new[message.priority]
  end
  old[message.group] = new[message.group]
  return old
end
