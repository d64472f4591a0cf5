--- Makes a part of the reply.
--- @include "lib/problems"
--- @include "topics/lib/events"
-- Note a fact about a name until `expires`, ms. `call.expires` is the latest expiry of the call.
local function set_fact(call, name, value, expires)
  call.facts[name], call.changed_facts[name] = value, expires
  call.expires = math.max(call.expires or 0, expires)
end

-- Return the fact about a name, or nil or false if there is none or it expired. Expired facts may still be stored.
local function get_fact(call, name)
  if call.facts[name] == nil then
    local expires = tonumber(redis.call("ZSCORE", call.K.dedup_expiry, name))
    call.facts[name] = expires and expires > call.now_ms and redis.call("HGET", call.K.dedup, name) or false
  end
  return call.facts[name]
end

-- Write the facts and the events of a call. It must not be the first write of a script (store_events).
local function store_dedup(call)
  if call.events then
    store_events(call.events)
  end
  local values, expiries = {}, {}
  for name, expires in pairs(call.changed_facts) do
    values[#values + 1], values[#values + 2] = name, call.facts[name]
    expiries[#expiries + 1], expiries[#expiries + 2] = expires, name
  end
  if #values > 0 then
    redis.call("HSET", call.K.dedup, unpack(values))
    redis.call("ZADD", call.K.dedup_expiry, unpack(expiries))
  end
  if call.expires then
    extend_lifetime(call.K, call.expires - call.now_ms, #values > 0)
  end
end

-- Return true for a copy of an event.
local function is_known_event(call, options)
  return options.event ~= "" and has_event(call.events, options.event, call.now_ms)
end

-- Check for a duplicate event, an outdated version or a closed window. A stored fact names its group, because the
-- group decides its slot after a reshard.
local function check_dedup(call, key, options)
  local p, now_ms, done = call.p, call.now_ms, call.done
  if is_known_event(call, options) then
    return "duplicate"
  end
  if options.version ~= "" then
    local held = get_fact(call, "v" .. key)
    if held and tonumber(options.version) < tonumber(string.match(held, "^[^ ]+")) then
      done.dropped_version = (done.dropped_version or 0) + 1
      call.noted[#call.noted + 1] = { "dropped_version", key }
      return "dropped"
    end
  end
  if p.leading and get_fact(call, "k" .. key) and (call.pending[key] or not call.undone[key]) then
    if p.quiet then
      set_fact(call, "k" .. key, options.group, now_ms + p.quiet)
    end
    done.dropped_window = (done.dropped_window or 0) + 1
    return "dropped"
  end
end

local function remember_trigger(call, key, options, due)
  local p, now_ms, group, version = call.p, call.now_ms, options.group, options.version
  if options.event ~= "" then
    local expires = math.max(now_ms, due) + p.remember
    add_event(call.events, options.event, expires, now_ms)
    call.expires = math.max(call.expires or 0, expires)
  end
  if version ~= "" then
    set_fact(call, "v" .. key, group == "" and version or version .. " " .. group, now_ms + p.remember)
  end
  if p.leading then
    set_fact(call, "k" .. key, group, now_ms + (p.window or p.quiet))
  end
end

-- Note in `call.undone` which keys have a delivery whose lease lapsed and that the next take ends as dead or cancelled. Nothing
-- ran for its window, as in `reopen_window`. A message behind it has opened a window of its own. Return a problem, or nil.
local function find_undone(call, names)
  --- @include "topics/lib/validate/stored"
  --- @include "topics/lib/slot/lease_times"
  --- @include "topics/lib/schedule/requeue"
  local K, p = call.K, call.p
  for _, key in ipairs(names) do
    if call.in_flight[key] and lease_end(K, redis.call("ZSCORE", K.leases, key)) <= call.now_ms then
      local problem = validate_keys(K, p, { key })
      if problem then
        return problem
      end
      local entry = parse_entry(read_entries(K, { key })[key])
      local m = delivered_message(K, key, entry)
      m.attempts = m.attempts + 1
      call.undone[key] = entry.cancelled or is_exhausted(p, m)
    end
  end
end

-- Return a problem with what is stored about the versions and the events of the triggers, or nil. A key of another type
-- raises an error.
local function validate_dedup(call, names, all_options)
  local K = call.K
  call.facts, call.changed_facts, call.undone = {}, {}, {}
  redis.call("HLEN", K.dedup)
  redis.call("ZCARD", K.dedup_expiry)
  for n, key in ipairs(names) do
    local options = all_options[n]
    if options.event ~= "" then
      call.events = call.events or load_events(K)
      if not check_bucket(call.events, bucket_of(call.events, options.event)) then
        return call.events.problem
      end
    end
    local name = "v" .. key
    local held = options.version ~= "" and get_fact(call, name)
    if held and not tonumber(string.match(held, "^[^ ]+") or "") then
      return corrupt_entry(K.dedup, name)
    end
  end
  return call.p.leading and next(call.in_flight) and find_undone(call, names) or nil
end
