"""The only I/O, and the only import of redis: a blocking link and an awaiting one that carry the same calls."""
