"""Redis Cluster: which node serves a key, and how to follow a redirect."""
