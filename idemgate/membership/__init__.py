"""Which worker serves which slot."""
