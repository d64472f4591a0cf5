-- Places in a delivery, an array: its fencing token, the take request that made it, 1 when it was cancelled, the packed message.
local delivery = { fence = 1, request = 2, cancelled = 3, message = 4, due = 5 }
