"""The scripts: data in files, one verb each, and the reader that expands their includes.

A line `--- @include "lib/x"` is replaced by that file, each file once a script (the idea is BullMQ's). Names of places
in a packed array, such as `message.due`, are replaced by their numbers: looking them up took a tenth of a trigger.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache, partial
from pathlib import Path

__all__ = ["Script", "commands", "names", "script", "source"]

_HERE = Path(__file__).parent  # importlib.resources would cost more than the rest of this package
_CALL = re.compile(rb'redis\.p?call\("([A-Z]+)"')
_INCLUDE = re.compile(r'^--- @include "([a-z_/]+)"$', re.MULTILINE)
_ARRAYS = {"lib/message": re.compile(r"\bmessage\.([a-z]+)\b"), "lib/delivery": re.compile(r"\bdelivery\.([a-z]+)\b")}
_PLACE = re.compile(r"(\w+) = (\d+)")


class Script:
    """One expanded script: `name` as in its path, `text`, and the SHA-1 by which servers know it."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text.encode()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


def source(name: str) -> str:
    """The file as it is written, for example `source("guard/claim")`."""
    return (_HERE / f"{name}.lua").read_text(encoding="utf-8")


def names() -> list[str]:
    """Every script (not the library files), sorted."""
    rooms = (room for room in _HERE.iterdir() if room.name in ("dedup", "expiry", "guard", "members", "topics"))
    return sorted(f"{room.name}/{file.name[:-4]}" for room in rooms for file in room.iterdir())


def _expand(name: str, seen: set[str]) -> str:
    def include(match: re.Match[str]) -> str:
        wanted = match[1]
        if wanted in seen:
            return ""
        seen.add(wanted)
        return "" if wanted in _ARRAYS else _expand(wanted, seen)

    return _INCLUDE.sub(include, _numbered(source(name)))


def _numbered(text: str) -> str:
    for name, named in _ARRAYS.items():
        if named.search(text):
            numbers = dict(_PLACE.findall(source(name)))
            text = named.sub(partial(_number, numbers), text)
    return text


def _number(numbers: dict[str, str], named: re.Match[str]) -> str:
    return numbers[named[1]]


@cache
def script(name: str) -> Script:
    """The script of that name, expanded and hashed once a process."""
    return Script(name, _expand(name, {name}))


def commands(name: str) -> frozenset[str]:
    """What the script of that name asks of the server, in capitals: whoever runs it must be allowed all of it."""
    return frozenset(found.decode() for found in _CALL.findall(script(name).text))
