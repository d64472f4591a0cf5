"""Presence: each process that uses a gate reports what it does, so that operators see it."""
