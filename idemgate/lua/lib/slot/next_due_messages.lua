-- Return the next due messages: their keys, their due times, and their members in the set that holds them.
local function next_due_messages(K, ranked, now_ms, most)
  local found, dues = {}, {}
  if ranked then
    local members = redis.call("ZRANGE", K.ready, 0, most - 1)
    for i, member in ipairs(members) do
      found[i], dues[i] = string.sub(member, 16), tonumber(string.sub(member, 1, 15))
    end
    return found, dues, members
  end
  local scored = redis.call("ZRANGEBYSCORE", K.scheduled, "-inf", now_ms, "WITHSCORES", "LIMIT", 0, most)
  for i = 1, #scored, 2 do
    local n = (i + 1) / 2
    found[n], dues[n] = scored[i], tonumber(scored[i + 1])
  end
  return found, dues, found
end
