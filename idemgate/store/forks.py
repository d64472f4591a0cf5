"""Whether this process is a forked child: counted, since asking for the process id is a system call."""

from __future__ import annotations

import os

__all__ = ["forks"]


class Forks:
    """How often this process was forked off from the one that loaded this module."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def happened(self) -> None:
        self.count += 1


forks = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forks.happened)
