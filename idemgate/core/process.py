"""The name of this process, as the store tells it to operators."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import PurePath

from idemgate.core.text import cut

__all__ = ["process_name", "program_name"]

_LONGEST = 100
"""The most characters of the program and of the host."""


def process_name() -> str:
    """Return the program, the pid and the host, such as "worker.py, pid 4711 on web-1"."""
    return f"{cut(program_name(), _LONGEST)}, pid {os.getpid()} on {cut(socket.gethostname(), _LONGEST)}"


def program_name() -> str:
    """Return the file of the program, the package of `python -m package`, or "python" for code that is in no file."""
    file = PurePath(sys.argv[0] if sys.argv else "")
    return (file.parent.name if file.name == "__main__.py" else file.name) or "python"
