"""Keys that expire, each handled once."""
