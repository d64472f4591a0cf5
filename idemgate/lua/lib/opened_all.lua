--- @include "lib/opened"
-- Packed messages as arrays, in place; nil if one of them is none of ours.
local function opened_all(packed)
  for i = 1, #packed do
    packed[i] = opened(packed[i])
    if not packed[i] then
      return nil
    end
  end
  return packed
end
