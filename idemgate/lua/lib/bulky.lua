-- Messages that are merged item by item, or field by field, are taken apart into values, each of which costs as much as a text of a dozen
-- bytes: `bulky.is(p)`; and as how many bytes of text one of so many counts. (Of large ones it is texts that make them large.)
local bulky = {}
function bulky.is(p)
  return p.merge.op == "union" or p.merge.op == "fields"
end
function bulky.bytes(p, size)
  return bulky.is(p) and size + 11 * math.min(size, 4096) or size
end
