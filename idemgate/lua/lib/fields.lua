-- The fields of a once record, a hash. Data dictionary:
--   s  layout (one digit) and state: p in progress, d done, f done with a stored failure, r released
--   o  owner token            f  fencing token         n  attempts started
--   e  lease end, ms          l  lease, ms             t  retention ends, ms
--   p  fingerprint            k  kind of result: v a value, n none was storable, e a failure
--   r  result                 c  checkpoint            x  times taken over
--   w  somebody waits         h  hold on lease loss    a  when the state was entered, ms
local fields = { "s", "o", "f", "n", "e", "l", "t", "p", "k", "r", "c", "x", "w", "h", "a" }
