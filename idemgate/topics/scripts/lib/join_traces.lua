-- Add the traces of the newer triggers `b` to those of the older ones `a`, of which there may be none. Each list is {number
-- of those that are not stored, trace, trace...}, oldest first. A trace is the text that the client sent with a trigger. Of
-- more than 16 the oldest 15 and the newest are stored. Triggers in turn with the same trace share it.
local function join_traces(a, b)
  if not a then
    return b
  end
  for i = 2, #b do
    if #a == 17 and a[17] ~= b[i] then
      a[1], a[17] = a[1] + 1, b[i]
    elseif a[#a] ~= b[i] then
      a[#a + 1] = b[i]
    end
  end
  a[1] = a[1] + b[1]
  return a
end
