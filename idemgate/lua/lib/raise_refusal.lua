-- Raise the error of a read, unless it says that the key has another type. A refusal by the access list tells nothing
-- about the key.
local function raise_refusal(text)
  if not string.find(text, "^WRONGTYPE") then
    error(text, 0)
  end
end
