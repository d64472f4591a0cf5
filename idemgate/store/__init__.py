"""Access to Redis or Valkey. The only package with I/O, and the only import of redis.

A blocking and an asynchronous link send the same calls.
"""
