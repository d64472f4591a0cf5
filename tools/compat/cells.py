"""What is tried: a cell is one combination, run with the suite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BASE", "COVER", "PARSERS", "PROTOCOLS", "PYTHONS", "REDIS_PY", "Cell", "product"]

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
COVER = [
    BASE,
    Cell("redis-6.2", "5.0.2", "3.11", "pure", "2"),  # the oldest of everything
    Cell("redis-8.10", "8", "3.13", "pure", "3"),  # the newest of everything
    Cell("redis-6.2", "8", "3.12", "hiredis", "3"),
    Cell("valkey-9.1", "5.0.2", "3.13", "hiredis", "3"),
    Cell("redis-7.0", "7", "3.13", "hiredis", "2"),
    Cell("redis-7.4", "6.4", "3.12", "pure", "2"),
    Cell("redis-8.0", "5.3", "3.11", "pure", "3"),
    Cell("valkey-8.1", "8", "3.12", "hiredis", "2"),
]
"""Every value of every axis, each server and redis-py at least once, oldest and newest in each other's company, too."""


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
