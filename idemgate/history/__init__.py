"""History: what happened to the messages of a key, for those who ask later."""
