-- The byte budget of one script call. Lua hashes every string it creates, at about 1 us per kB, and creates several
-- per message. So bytes block the server as much as the number of messages does.
local max_call_bytes = 131072
