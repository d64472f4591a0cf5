-- How many bytes of messages one call goes through: Lua hashes each text that it makes byte by byte, 1 us a kB, and makes some of each
-- message, so that it is bytes that hold the server, as much as numbers do.
local most_bytes = 131072
