"""The guard: `@once` on any function, and the claim it is made of."""
