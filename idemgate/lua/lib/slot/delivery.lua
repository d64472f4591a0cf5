-- Indexes of a delivery, which is an array: fencing token, id of the take request, 1 if cancelled, due time, and the
-- message's count and group. The packed message comes last, so a delivery can end without creating that string.
local delivery = { fence = 1, request = 2, cancelled = 3, due = 4, count = 5, group = 6, message = 7 }
