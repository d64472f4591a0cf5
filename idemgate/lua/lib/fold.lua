--- @include "lib/merge"
--- @include "lib/message"
-- Makes one message of two of the same key, `old` the older. Due time, attempts and reason stay those of `old`: the caller decides.
local function fold(spec, old, new)
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
