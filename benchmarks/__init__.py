"""Benchmarks: against the limits of the machine and against peers. Not shipped. Run `python -m benchmarks --help`."""
