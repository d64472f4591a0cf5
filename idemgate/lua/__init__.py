"""The scripts: data in files, one verb each, and the reader that expands their includes.

A line `--- @include "lib/x"` is replaced by that file, each file once a script (the idea is BullMQ's).
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

__all__ = ["Script", "names", "script", "source"]

_HERE = Path(__file__).parent  # importlib.resources would cost more than the rest of this package
_INCLUDE = re.compile(r'^--- @include "([a-z_/]+)"$', re.MULTILINE)


class Script:
    """One expanded script: `name` as in its path, `text`, and the SHA-1 by which servers know it."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text.encode()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


def source(name: str) -> str:
    """The file as it is written, for example `source("once/claim")`."""
    return (_HERE / f"{name}.lua").read_text(encoding="utf-8")


def names() -> list[str]:
    """Every script (not the library files), sorted."""
    rooms = (room for room in _HERE.iterdir() if room.name in ("members", "once", "topic"))
    return sorted(f"{room.name}/{file.name[:-4]}" for room in rooms for file in room.iterdir())


def _expand(name: str, seen: set[str]) -> str:
    def include(match: re.Match[str]) -> str:
        wanted = match[1]
        if wanted in seen:
            return ""
        seen.add(wanted)
        return _expand(wanted, seen)

    return _INCLUDE.sub(include, source(name))


@cache
def script(name: str) -> Script:
    """The script of that name, expanded and hashed once a process."""
    return Script(name, _expand(name, {name}))
