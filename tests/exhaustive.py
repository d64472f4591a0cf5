"""Exhaustive search in a small scope: every order of steps up to a depth, asked of the scripts themselves.

A state is what the server holds, as DUMPs, and what the world knows of it. It is brought back, each step that may
follow is asked of it, and what comes out is judged; states that are the same are looked at once.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pytest
import redis

from idemgate.lua import script
from tests.conftest import FAULTS

__all__ = ["Search", "Step", "Violation", "choose_depth", "frozen"]


def choose_depth(usual: int, slow: int, reliability: int) -> pytest.MarkDecorator:
    """Parametrize a test with `depth`, a number of steps: of the usual tests, the slow ones, and a reliability run."""
    given = os.environ.get("IDEMGATE_DEPTH", str(reliability) if FAULTS >= 1000 else "")
    depths = [int(given)] if given else [usual, pytest.param(slow, marks=pytest.mark.slow)]
    return pytest.mark.parametrize("depth", depths)


class Violation(Exception):
    """An invariant that a path of steps breaks."""

    def __init__(self, what: str, path: tuple[str, ...]) -> None:
        super().__init__(f"{what}: {' > '.join(path)}")
        self.path = path


class State(Protocol):
    """`dumps`: one a key. `same`: what makes two states one; not how they came to be, which is `path`."""

    @property
    def dumps(self) -> tuple[bytes, ...]: ...
    @property
    def path(self) -> tuple[str, ...]: ...
    def same(self) -> Any: ...


@dataclass(frozen=True)
class Step:
    """What may come next. Without a script nothing is asked of the server."""

    name: str
    script: str = ""
    args: tuple[Any, ...] = ()


S = TypeVar("S", bound=State)
T = TypeVar("T", bound=Step)


class Search(ABC, Generic[S, T]):
    """`scripts` replaces the text of some. `reset` and `snapshot` are scripts that bring back and show what is in
    `keys`; what `snapshot` returns begins with the dumps."""

    def __init__(
        self, raw: redis.Redis, keys: Sequence[bytes], reset: str, snapshot: str, scripts: Mapping[str, str]
    ) -> None:
        self.raw = raw
        self.keys = keys
        self.reset, self.snapshot = raw.script_load(reset), raw.script_load(snapshot)
        self.scripts = dict(scripts)
        self.shas: dict[str, str] = {}

    @abstractmethod
    def start(self) -> S:
        """Where all paths begin."""

    @abstractmethod
    def steps(self, state: S) -> Iterator[T]:
        """What may happen next."""

    def asks(self, step: T) -> Sequence[bytes]:
        """The keys of the step's script."""
        return self.keys

    def runs(self, step: T) -> str:
        """The name of the step's script in `scripts`."""
        return step.script

    @abstractmethod
    def asked(self, state: S, step: T) -> tuple[Any, ...]:
        """The arguments of the step's script."""

    @abstractmethod
    def answered(self, state: S, step: T, reply: Any, found: Any) -> S:
        """What comes of a step with a script. Raises Violation."""

    @abstractmethod
    def alone(self, state: S, step: T) -> S:
        """What comes of a step without one."""

    def run(self, depth: int) -> int:
        """How many states there are up to that many steps. Raises Violation, whose text is the path to it."""
        frontier, seen = [self.start()], {self.start().same()}
        try:
            for _ in range(depth):
                found: list[S] = []
                for at in range(0, len(frontier), 50):
                    found += self._next(frontier[at : at + 50], seen)
                frontier = found
        finally:
            self.raw.delete(*self.keys)
        return len(seen)

    def follow(self, path: Sequence[str]) -> None:
        """Takes these steps, and looks at those beside them. Raises Violation."""
        states = [self.start()]
        try:
            for name in path:
                states = [after for after in self._next(states, set()) if after.path[-1] == name]
        finally:
            self.raw.delete(*self.keys)

    def check(self, state: S, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what, state.path)

    def _next(self, states: list[S], seen: set[Any]) -> Iterator[S]:
        steps = [(state, step) for state in states for step in self.steps(state)]
        n = len(self.keys)
        with self.raw.pipeline(transaction=False) as pipe:
            for state, step in steps:
                if step.script:
                    pipe.evalsha(self.reset, n, *self.keys, *state.dumps)
                    keys = self.asks(step)
                    pipe.evalsha(self._sha(self.runs(step)), len(keys), *keys, *self.asked(state, step))
                    pipe.evalsha(self.snapshot, n, *self.keys)
            replies = iter(pipe.execute())
        for state, step in steps:
            if step.script:
                next(replies)
                after = self.answered(state, step, frozen(next(replies)), frozen(next(replies)))
            else:
                after = self.alone(state, step)
            if (same := after.same()) not in seen:
                seen.add(same)
                yield after

    def _sha(self, name: str) -> str:
        if name not in self.shas:
            self.shas[name] = self.raw.script_load(self.scripts.get(name) or script(name).text.decode())
        return self.shas[name]


def frozen(value: Any) -> Any:
    return tuple(frozen(one) for one in value) if isinstance(value, list) else value
