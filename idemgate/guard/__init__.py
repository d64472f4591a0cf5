"""The guard: the decorator `once` and the claims it is built on."""
