--- Keys: key
-- Return the fields of a record that a client has written without a script, as unpack_record does, or nil and the
-- problem. Such a record holds no time, because a client's clock may be wrong. Its times follow from the key's expiry.
--   192            a claim, the first of its key: flags (1 = held), lease and time to live as ms, owner id
--   192, shorter   a mark: retention as ms, owner id
--   245, 246, 247  done at the first attempt, of kind "v", "n" or "e": fence, retention in minutes, result
-- Its owner reads the expiry by a second command, within a second of sending both, or asks the script for its token. For
-- that second no script gives the key of a new claim another expiry, or deletes it:
--   cancel, a claim that waits, and a clock that was set back keep the expiry
--   a takeover, mark and resolve need a lease that has ended, and it lasts for 6 s at least
--   complete, release, renew and checkpoint come from the owner, after it has read the expiry
--   forget by force is answered "early" for 5 s, unless its caller has seen the claim for more than a second
local function unpack_plain(code, stored, key)
  local expires, length = redis.call("PEXPIRETIME", key), #stored
  if expires < 0 then
    return nil, "holds a record that has lost its expiry"
  end
  if code == 192 and length == 30 then
    local flags, lease, lifetime, owner = struct.unpack(">xBI6I6c16", stored)
    local begun = expires - lifetime
    return "p", "", owner, begun * 1000, 1, 0, begun + lease, begun, "", "", lease, flags % 2, 0, 0 -- fault: plain-claim
  end
  if code == 192 and length == 23 then
    local lifetime, owner = struct.unpack(">xI6c16", stored)
    local begun = expires - lifetime
    return "d", "n", owner, begun * 1000, 1, 0, expires, begun, "", "" -- fault: plain-mark
  end
  if code ~= 192 and length >= 10 then
    local fence, minutes = struct.unpack(">xI7I2", stored)
    local kind = code == 245 and "v" or code == 246 and "n" or "e"
    return kind == "e" and "f" or "d", kind, "", fence, 1, 0, expires, expires - minutes * 60000, "", string.sub(stored, 11) -- fault: plain-done
  end
  return nil, "holds a record of another layout"
end
