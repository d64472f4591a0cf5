"""Membership of workers: the assignment of slots to workers."""
