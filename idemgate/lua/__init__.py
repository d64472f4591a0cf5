"""The Lua scripts, one file each, and the loader that expands their includes.

A line `--- @include "lib/x"` is replaced by that file, at most once per script (the idea is BullMQ's). Indented lines
include files for the function around them, each at most once. Then the functions of these files are created only when
that function runs. Creating one costs about as much as querying a key.

No server gets the headers of the files (`---`), or the markers `-- fault: name` of the lines that tests change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["Script", "commands", "expand", "libraries", "name_of", "names", "script", "source"]

_DIRECTORY = Path(__file__).parents[1]  # importing importlib.resources costs more than the rest of this package
_CALL = re.compile(rb'redis\.p?call\("([A-Z]+(?:", "[A-Z]+)?)"')
_INCLUDE = re.compile(r'--- @include "([a-z_/]+)"\n')
_INCLUDES = re.compile(r'(?:^--- @include "[a-z_/]+"\n)+|(?:^ +--- @include "[a-z_/]+"\n)+', re.MULTILINE)
_UNSENT = re.compile(r" -- fault: .+|^---.*\n", re.MULTILINE)


class Script:
    """An expanded script: its name (the path), its text, and the SHA-1 for EVALSHA."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name: str = name
        self.text: bytes = text.encode()
        self.sha: bytes = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


def source(name: str) -> str:
    """Return the file as written: "guard/claim" is `guard/scripts/claim.lua`, "lib/now" is `lua/lib/now.lua`."""
    package, _, rest = name.partition("/")
    folder = "lua/lib" if package == "lib" else f"{package}/scripts"
    return (_DIRECTORY / folder / f"{rest}.lua").read_text(encoding="utf-8")


def names() -> list[str]:
    """Return the names of all scripts, sorted, without libraries and `store/touch`, which users of all roles run."""
    return [name for name in _files() if "/lib/" not in name and not name.startswith("store/")]


def libraries() -> list[str]:
    """Return the names of all files that scripts include, sorted."""
    shared = [f"lib/{file.stem}" for file in (_DIRECTORY / "lua" / "lib").glob("*.lua")]
    return sorted(shared + [name for name in _files() if "/lib/" in name])


def _files() -> list[str]:
    found = (file.relative_to(_DIRECTORY).with_suffix("") for file in _DIRECTORY.glob("*/scripts/**/*.lua"))
    return sorted(file.as_posix().replace("/scripts/", "/", 1) for file in found)


def expand(name: str, seen: set[str] | None = None, read: Callable[[str], str] | None = None) -> str:
    """Return a script with its includes, headers and markers. `seen`: its files so far. `read`: used for `source`."""
    seen = {name} if seen is None else seen

    def include(block: re.Match[str]) -> str:
        scope = seen.copy() if block[0].startswith(" ") else seen
        files = list[str]()
        for included in _INCLUDE.findall(block[0]):
            if included not in scope:
                scope.add(included)
                files.append(expand(included, scope, read))
        return "".join(files)

    return _INCLUDES.sub(include, (read or source)(name))


@cache
def script(name: str) -> Script:
    """Return the script with that name. It is expanded and hashed once per process."""
    found = Script(name, _UNSENT.sub("", expand(name)))
    _names[found.sha] = name
    return found


_names: dict[bytes, str] = {}


def name_of(sha: bytes) -> str | None:
    """Return the name of the script with this SHA-1, or None if `script` has not returned it yet."""
    return _names.get(sha)


def commands(name: str) -> frozenset[str]:
    """Return the Redis commands of a script, in capitals, such as "HSET" or "XGROUP|DELCONSUMER".

    Its user needs permission for all of them.
    """
    return frozenset(found.decode().replace('", "', "|") for found in _CALL.findall(script(name).text))
