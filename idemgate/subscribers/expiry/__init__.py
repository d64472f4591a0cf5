"""Subscription to expired keys, each handled once."""
