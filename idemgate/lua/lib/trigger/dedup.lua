--- @include "lib/validate/problems"
--- @include "lib/dedup/events"
-- Store a fact about a name until `expires`, ms. `call.expires` is the latest expiry that the call stored.
local function set_fact(call, name, value, expires)
  redis.call("HSET", call.K.dedup, name, value)
  redis.call("ZADD", call.K.dedup_expiry, expires, name)
  call.facts, call.expires = true, math.max(call.expires or 0, expires)
end

-- Return the fact stored about a name, or nil if there is none or it expired. Expired facts may still be stored.
local function get_fact(K, name, now_ms)
  local expires = tonumber(redis.call("ZSCORE", K.dedup_expiry, name))
  if expires and expires > now_ms then
    return redis.call("HGET", K.dedup, name)
  end
end

-- Check for a duplicate event, an outdated version or a closed window. A stored fact names its group, because the
-- group decides its slot after a reshard.
local function check_dedup(call, key, options)
  local K, p, now_ms = call.K, call.p, call.now_ms
  if options.event ~= "" and has_event(call.events, options.event, now_ms) then
    return "duplicate"
  end
  if options.version ~= "" then
    local held = get_fact(K, "v" .. key, now_ms)
    if held and tonumber(options.version) < tonumber(string.match(held, "^[^ ]+")) then
      return "dropped"
    end
  end
  if p.leading and get_fact(K, "k" .. key, now_ms) then
    if p.quiet then
      set_fact(call, "k" .. key, options.group, now_ms + p.quiet)
    end
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

-- Return a problem with what is stored about the version and the event of a trigger, or nil.
local function validate_dedup(call, key, options)
  if options.event ~= "" then
    call.events = call.events or load_events(call.K)
    if not check_bucket(call.events, bucket_of(call.events, options.event)) then
      return call.events.problem
    end
  end
  local name = "v" .. key
  local held = options.version ~= "" and get_fact(call.K, name, call.now_ms)
  if held and not tonumber(string.match(held, "^[^ ]+") or "") then
    return corrupt_entry(call.K.dedup, name)
  end
end
