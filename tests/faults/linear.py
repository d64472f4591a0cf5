"""Whether a recorded history of one key is linearizable: each operation took effect at one moment between its call and
its return, in some order that the sequential model answers the same.

The search of Wing and Gong, with Lowe's memory of configurations that were seen: at each step one of the operations
that were called before the first return among those left is tried as the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tests.guard.test_model import Model, Stored

__all__ = ["UNKNOWN", "Operation", "linearizable"]

UNKNOWN = object()
"""The answer of an operation whose caller gave up: it may take effect at any time from its call on, or never."""


@dataclass(frozen=True)
class Operation:
    """`called`, `returned`: of one clock. `us` is the time that the script was told."""

    called: float
    returned: float
    us: int
    verb: str
    arguments: tuple[Any, ...]
    answer: Any


def linearizable(history: Sequence[Operation]) -> bool:
    left = [one for one in history if one.verb != "inspect" or one.answer is not UNKNOWN]
    seen: set[tuple[int, Any]] = set()
    # (what is done, as bits; the state then)
    stack: list[tuple[int, Stored]] = [(0, Stored())]
    while stack:
        done, state = stack.pop()
        waiting = [place for place in range(len(left)) if not done >> place & 1]
        if all(left[place].answer is UNKNOWN for place in waiting):
            return True
        horizon = min(left[place].returned for place in waiting)
        for place in waiting:
            one = left[place]
            if one.called <= horizon and (then := _after(state, one)) is not None:
                config = (done | 1 << place, astuple(then))
                if config not in seen:
                    seen.add(config)
                    stack.append((config[0], then))
    return False


def _after(state: Stored, one: Operation) -> Stored | None:
    """The state after it, None if it would have been answered otherwise."""
    model = Model()
    model.key = state
    perform: Callable[..., Any] = model.looks if one.verb == "inspect" else getattr(model, one.verb)
    answer = perform(one.us, *one.arguments)
    return model.key if one.answer is UNKNOWN or answer == one.answer else None
