"""What callgrind counted of a server, by the role of the code: whose call each instruction was part of."""

from __future__ import annotations

import re
import subprocess
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Rooms", "counted", "totals"]

NAME = re.compile(r"(c?)(ob|fn)=\((\d+)\)(?: (.*))?")


class Edge(NamedTuple):
    """One function called another: instructions of the callee, with all that it called in turn."""

    caller: str
    callee: str
    instructions: int


class Rooms:
    """Which part of the server a function belongs to. Debian's server has no symbols but those it exports, so callgrind
    names most functions by their address; files lie one behind the other, so exported names say where they begin."""

    def __init__(self, program: str) -> None:
        self.program = str(Path(program).resolve())  # as callgrind names it
        said = subprocess.run(["nm", "-D", "--defined-only", program], capture_output=True, text=True, check=True)
        words = (line.split() for line in said.stdout.splitlines())
        self.at = {name: int(address, 16) for address, _, name in words}
        lua = min(address for name, address in self.at.items() if name.startswith(("lua_", "luaL_")))
        marks = [
            (0, "server"), (self.at["luaGetFromRegistry"], "plumbing"), (self.at["scriptIsTimedout"], "server"),
            (lua, "lua"), (self.at["luaopen_cjson_safe"] + 1, "packing"), (self.at["luaopen_cmsgpack_safe"], "lua"),
        ]  # fmt: skip
        self._starts, self._rooms = zip(*marks, strict=True)

    def of(self, function: str) -> str:
        """server, plumbing (of a call out of Lua), lua, packing (struct, cmsgpack)."""
        name = function.partition("'")[0]
        address = int(name, 16) if name.startswith("0x") else self.at.get(name, 0)
        return str(self._rooms[bisect_right(self._starts, address) - 1])


def counted(file: Path, rooms: Rooms) -> dict[str, int]:
    """Instructions by role, which add up to `all`; and by library, which are parts of those."""
    found: dict[str, int] = defaultdict(int)
    for edge in _edges(file, rooms, found):
        for role in _entered(edge, rooms):
            found[role] += edge.instructions
    scripts, asked, packing, nested, alone = (found[role] for role in ("eval", "asked", "packing", "nested", "alone"))
    everything = totals(file)["Ir"]
    return {
        "all": everything,
        "network": everything - scripts - alone,
        "lua": scripts - asked - packing,
        "packing": packing,
        "plumbing": asked - nested,
        "commands": nested + alone,
        "allocator": found["libjemalloc"],
        "libc": found["libc"],
    }


def _entered(edge: Edge, rooms: Rooms) -> Iterator[str]:
    """The roles that begin with a call."""
    if edge.callee.startswith("eval") and edge.caller == "call":
        yield "eval"
    elif edge.callee.endswith("Command") and edge.caller.startswith("call"):
        yield "alone" if edge.caller == "call" else "nested"
    elif rooms.of(edge.caller) == "lua" and rooms.of(edge.callee) in ("plumbing", "packing"):
        yield {"plumbing": "asked", "packing": "packing"}[rooms.of(edge.callee)]


def _edges(file: Path, rooms: Rooms, found: dict[str, int]) -> Iterator[Edge]:
    """The calls; functions of libraries have no name here. Into `found`: the instructions of each library alone."""
    names: dict[tuple[str, str], str] = {}
    now: dict[str, str] = {}
    calls = False
    for line in file.read_text().splitlines():
        if named := NAME.match(line):
            called, kind, number, name = named.groups()
            names.setdefault((kind, number), name)
            now[called + kind] = names[kind, number]
        elif line.startswith("calls="):
            calls = True
        elif line[:1].isdigit() or line.startswith(("+", "-", "*")):
            instructions, home = int(line.split()[1]), now["ob"]
            if calls:
                callee = now["cfn"] if now.pop("cob", home) == rooms.program else ""
                yield Edge(now["fn"] if home == rooms.program else "", callee, instructions)
            else:
                found[Path(home).name.partition(".")[0]] += instructions
            calls = False


def totals(file: Path) -> dict[str, int]:
    """Every event that was counted: Ir, and with a simulated cache DLmr (loads that miss the last level) and so on."""
    said = [line.split()[1:] for line in file.read_text().splitlines() if line.startswith(("events:", "totals:"))]
    events, counts = said
    return dict(zip(events, map(int, counts), strict=False))
