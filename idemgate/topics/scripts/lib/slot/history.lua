--- Keys: list
-- The history of a slot: a list beside its keys with the newest transitions of messages that left the usual path, newest first,
-- or of all messages if the topic asks for it (`history` of the policy, which is also their number, else 64).
-- It is no key of `slot`, because calls on the usual path do not pass it, and it stays where it is when the number of slots
-- changes. An entry is its time, ms (6 bytes), then a packed array:
--   what      "cancelled", "cancel_asked", "buried", "lapsed", "lost", "redriven", "deleted", "outdated", "dropped_version",
--             "dropped_full". Of all messages also "scheduled", "merged", "replaced", "dropped", "duplicate", "taken", "acked",
--             "nacked", "returned", "deferred", "rescheduled", "forwarded"
--   key       the key, or "#" and its SHA-1 if it is long, or is to be hidden
--   token     fencing token of the delivery, as text, or ""
--   attempts, triggers, serial    of the message, 0 = unknown
--   by        the operator or the process: a name of more than 8 bytes, or the first 8 bytes of its request ids
--   error     "", and then only of an event: the first 16 bytes of its mark (topics/lib/events)

local function history_of(K)
  return string.sub(K.meta, 1, -5) .. "history"
end

-- Note a transition of a key, to be written by `write_history`. `m`: the message, if it is known.
local function note_transition(K, what, key, token, m, event)
  local noted = K.noted or {}
  K.noted, noted[#noted + 1] = noted, { what, key, token or "", m and m.attempts or 0, m and m.count or 0, m and m.serial or 0 }
  if event and event ~= "" then
    noted[#noted][8], noted[#noted][9] = "", string.sub(event, 1, 16)
  end
end

-- Write what was noted. It must not be the first write of a script (require_storing). A list of another type, a refusal or a
-- cluster that is moving the slot loses the entries, and nothing else: then the transition itself was written already.
local function write_history(K, p, by, now_ms)
  local list, packed = history_of(K), {}
  for i, entry in ipairs(K.noted or packed) do
    entry[2] = (p.hidden or #entry[2] > 128) and "#" .. redis.sha1hex(entry[2]) or entry[2]
    entry[7] = by
    packed[i] = struct.pack(">I6", now_ms) .. cmsgpack.pack(entry)
  end
  if #packed > 0 then
    redis.pcall("LPUSH", list, unpack(packed))
    redis.pcall("LTRIM", list, 0, (p.history or 64) - 1)
    redis.pcall("PEXPIRE", list, "2592000000")
    K.noted = nil
  end
end
