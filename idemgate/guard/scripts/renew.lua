--- Renew the lease of a claim from now on (heartbeat). Idempotent.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner id
--- ARGV[3] lease, ms
--- ARGV[4] time by which attempts and checkpoint outlive the lease, ms
--- Returns {"ok", now ms} {"cancelled", now ms} (renewed, and asked to stop) {"lost", now ms} {"foreign", now ms, problem}
--- @include "lib/now"
--- @include "guard/lib/write_record"
--- @include "guard/lib/replace_record"
-- Return the lifetime of a running claim's record, ms. A held key waits for a decision: ten years.
local function record_ttl(held, otherwise)
  if held == 1 then
    return 315360000000
  end
  return otherwise
end

local key, id, lease, keep = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now_ms = math.floor(now(ARGV[1]) / 1000)
local r, problem = read_record(key)
if not r then
  return { "foreign", now_ms, problem }
end
if r.state ~= "p" or r.owner ~= id then -- fault: renew-owner
  return { "lost", now_ms }
end
r.ends, r.lease = now_ms + lease, lease
replace_record(key, pack_record_table(r), record_ttl(r.held, lease + keep))
return { r.cancelled == 1 and "cancelled" or "ok", now_ms } -- fault: renewed
