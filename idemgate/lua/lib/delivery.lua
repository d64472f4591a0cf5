-- Places in a delivery, an array: its fencing token, the take request that made it, 1 when it was cancelled, the packed message, when
-- it was due, and of the message its count and its group, so that ending it need not unpack that.
local delivery = { fence = 1, request = 2, cancelled = 3, message = 4, due = 5, count = 6, group = 7 }
