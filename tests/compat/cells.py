"""What is tried: a cell is one combination, run with the suite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.compat.servers import SERVERS

__all__ = ["BASE", "PARSERS", "PROTOCOLS", "PYTHONS", "REDIS_PY", "Cell", "product", "star"]

PYTHONS = ["3.11", "3.12", "3.13"]
REDIS_PY = ["5.0.2", "5.3", "6.4", "7", "8"]
PARSERS = ["hiredis", "pure"]
PROTOCOLS = ["2", "3"]


@dataclass(frozen=True, slots=True)
class Cell:
    """`protocol` is that of the user: of URLs and clients handed to a gate. Ours speak RESP2 always."""

    server: str
    redis_py: str
    python: str
    parser: str
    protocol: str

    @property
    def name(self) -> str:
        return f"{self.server}_redis-py-{self.redis_py}_python-{self.python}_{self.parser}_RESP{self.protocol}"


BASE = Cell("valkey-9.1", "8", "3.11", "hiredis", "2")
OLDEST = Cell("redis-6.2", "5.0.2", "3.11", "pure", "2")
NEWEST = Cell("redis-8.10", "8", "3.13", "pure", "3")


def star() -> list[Cell]:
    """Each value of each axis with the others at BASE, and the oldest and the newest of everything."""
    cells = [replace(BASE, server=one) for one in SERVERS]
    cells += [replace(BASE, redis_py=one) for one in REDIS_PY]
    cells += [replace(BASE, python=one) for one in PYTHONS]
    cells += [replace(BASE, parser=one) for one in PARSERS]
    cells += [replace(BASE, protocol=one) for one in PROTOCOLS]
    return list(dict.fromkeys([*cells, OLDEST, NEWEST]))


def product(
    servers: Sequence[str],
    redis_py: Sequence[str],
    pythons: Sequence[str],
    parsers: Sequence[str],
    protocols: Sequence[str],
) -> list[Cell]:
    """Every combination; an axis with no value is at BASE."""
    return [
        Cell(*values)
        for values in itertools.product(
            servers or [BASE.server],
            redis_py or [BASE.redis_py],
            pythons or [BASE.python],
            parsers or [BASE.parser],
            protocols or [BASE.protocol],
        )
    ]
