-- As how many bytes of text one of a message counts: what is merged item by item, or field by field, is taken apart into values, each of
-- which costs about as much as a text of a dozen bytes.
local function bulky(p)
  return (p.merge.op == "union" or p.merge.op == "fields") and 12 or 1
end
