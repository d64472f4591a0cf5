"""The name of this process, as the store tells it to operators."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import PurePath

__all__ = ["process_name", "program_name"]

_LONGEST = 100
"""The most characters of the program and of the host."""


def process_name() -> str:
    """Return the program, the pid and the host, such as "worker.py, pid 4711 on web-1"."""
    return f"{_cut(program_name())}, pid {os.getpid()} on {_cut(socket.gethostname())}"


def program_name() -> str:
    """Return the file of the program, the package of `python -m package`, or "python" for code that is in no file."""
    file = PurePath(sys.argv[0] if sys.argv else "")
    return (file.parent.name if file.name == "__main__.py" else file.name) or "python"


def _cut(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()[:_LONGEST]
