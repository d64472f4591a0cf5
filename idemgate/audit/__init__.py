"""Consistency checks of the stored data, the server and histories."""
