-- Places in a delivery, an array: its fencing token, the take request that made it, 1 when it was cancelled, when it was due, of the
-- message its count and its group, and behind them the packed message, of which no text need be made to end the delivery.
local delivery = { fence = 1, request = 2, cancelled = 3, due = 4, count = 5, group = 6, message = 7 }
