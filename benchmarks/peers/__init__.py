"""The contestants, idemgate among them: each a program in an environment of its own that does steps on request."""
