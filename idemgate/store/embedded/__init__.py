"""A server of this process: `embedded://`."""
