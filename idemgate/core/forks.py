"""Fork handling: hooks that run in a forked child, a count of forks, and locks that are free in the child.

Only the forking thread exists in the child. A lock held by another thread at the fork would never be released there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from weakref import WeakKeyDictionary

__all__ = ["fork_counter", "lock_reset_at_fork", "run_in_child"]

_lock_owners: WeakKeyDictionary[object, str] = WeakKeyDictionary()


class ForkCounter:
    """The number of forks between this process and the one that loaded this module.

    Comparing `count` costs less than `os.getpid()`, which is a system call.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count: int = 0

    def increment(self) -> None:
        """Count one fork."""
        self.count += 1


fork_counter: ForkCounter = ForkCounter()


def run_in_child(hook: Callable[[], object]) -> None:
    """Call `hook` in every forked child; does nothing on platforms without fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=hook)


def lock_reset_at_fork(owner: object, name: str) -> Lock:
    """Return a new lock for the attribute `name` of `owner`.

    A forked child replaces the attribute with another free lock. `owner` is held weakly.
    """
    _lock_owners[owner] = name
    return Lock()


def _reset_locks() -> None:
    for owner, name in _lock_owners.items():
        setattr(owner, name, Lock())


run_in_child(fork_counter.increment)
run_in_child(_reset_locks)
