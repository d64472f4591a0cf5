"""Locks that a forked child finds free: whoever held one at the fork is not in it, and would never let go."""

from __future__ import annotations

import os
from threading import Lock
from weakref import WeakKeyDictionary

__all__ = ["freed_at_fork"]

_owners: WeakKeyDictionary[object, str] = WeakKeyDictionary()


def freed_at_fork(owner: object, name: str) -> Lock:
    """A lock for that attribute of the owner, which has another one, a free one, in a forked child."""
    _owners[owner] = name
    return Lock()


def _free() -> None:
    for owner, name in _owners.items():
        setattr(owner, name, Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
