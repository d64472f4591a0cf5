"""The name of this process and of who changes something with it. Operators read both in the store."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath

from idemgate.core.calls import PROCESS_BYTES
from idemgate.core.text import cut

__all__ = ["actor_name", "operated_by", "process_name", "program_name"]

_LONGEST = 100
"""The most characters of the program and of the host."""
_LONGEST_ACTOR = 250
_operator: ContextVar[str] = ContextVar("idemgate_operator", default="")


@contextmanager
def operated_by(who: str) -> Generator[None]:
    """Name an operator in what this thread or task stores, instead of the process that runs the verb."""
    before = _operator.set(who)
    try:
        yield
    finally:
        _operator.reset(before)


def actor_name() -> str:
    """Return who changes something: the operator of the verb that runs, else this process.

    Where a history names who did something, 8 bytes are the id of a process. So spaces follow a short name of an
    operator. Readers strip them.
    """
    who = _operator.get()
    return cut(who, _LONGEST_ACTOR).ljust(PROCESS_BYTES + 1) if who else process_name()


def process_name() -> str:
    """Return the program, the pid and the host, such as "worker.py, pid 4711 on web-1"."""
    return f"{cut(program_name(), _LONGEST)}, pid {os.getpid()} on {cut(socket.gethostname(), _LONGEST)}"


def program_name() -> str:
    """Return the file of the program, the package of `python -m package`, or "python" for code that is in no file."""
    file = PurePath(sys.argv[0] if sys.argv else "")
    return (file.parent.name if file.name == "__main__.py" else file.name) or "python"
