"""Whether a recorded history of one key is linearizable: each operation took effect at one moment between its call and
its return, in some order that the sequential model answers the same.

A request that reached the server more than once is one operation that was answered, and as many copies beside it whose
answers nobody heard. A copy may come at any time; that it has no second effect is the model's affair.

The search of Wing and Gong, with Lowe's memory of configurations that were seen: at each step one of the operations
that were called before the first return among those left is tried as the next.
What nobody heard need not have happened: of two ways to the same state, the one that took less of it can go on
wherever the other can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from math import inf
from typing import Any

from tests.guard.test_model import Model, Stored

__all__ = ["PLAIN_SPOILT", "SPOILT", "UNKNOWN", "Operation", "linearizable"]

UNKNOWN = object()
"""The answer of an operation whose caller gave up: it may take effect at any time from its call on, or never."""


@dataclass(frozen=True)
class Operation:
    """`called`, `returned`: of one clock. `us` is the time that the script was told. `copies`: how often it reached the
    server beyond the first time."""

    called: float
    returned: float
    us: int
    verb: str
    arguments: tuple[Any, ...]
    answer: Any
    copies: int = 0

    @property
    def unheard(self) -> Operation:
        return replace(self, returned=inf, answer=UNKNOWN, copies=0)


def linearizable(history: Sequence[Operation]) -> bool:
    spread = [one for op in history for one in (op, *[op.unheard] * op.copies)]
    left = [one for one in spread if one.verb != "inspect" or one.answer is not UNKNOWN]
    left.sort(key=lambda one: one.answer is not UNKNOWN)  # the last is tried first: what must have happened
    heard = sum(1 << place for place, one in enumerate(left) if one.answer is not UNKNOWN)
    seen: dict[tuple[int, Any], list[int]] = {}
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
                if one.answer is UNKNOWN and then == state:
                    continue  # as if it never came
                after = done | 1 << place
                known = seen.setdefault((after & heard, astuple(then)), [])
                if not any(fewer & after == fewer for fewer in known):
                    known.append(after)
                    stack.append((after, then))
    return False


def _after(state: Stored, one: Operation) -> Stored | None:
    """The state after it, None if it would have been answered otherwise."""
    model = Model()
    model.key = state
    perform: Callable[..., Any] = model.looks if one.verb == "inspect" else getattr(model, one.verb)
    answer = perform(one.us, *one.arguments)
    return model.key if one.answer is UNKNOWN or answer == one.answer else None


SPOILT = [
    ("guard/claim", "a claim does not look at the lease"),
    ("guard/claim", "a claim does not know its copies"),
    ("guard/complete", "anybody completes"),
    ("guard/release", "anybody gives back"),
    ("guard/renew", "a former owner beats"),
    ("guard/claim", "tokens do not rise"),
    ("guard/forget", "what came since is forgotten"),
    ("guard/forget", "what is live is forgotten"),
    ("guard/resolve", "what came since is decided"),
    ("guard/resolve", "what is live is decided"),
    ("guard/resolve", "a decision has no owner"),
    ("guard/checkpoint", "a former owner notes"),
    ("guard/claim", "a lost lease is not counted"),
    ("guard/complete", "a completion does not know its copies"),
    ("guard/release", "giving back does not know its copies"),
    ("guard/forget", "forgetting does not know its copies"),
    ("guard/resolve", "deciding does not know its copies"),
]
"""Scripts, and a fault of each that a history shows."""
PLAIN_SPOILT = [
    ("guard/claim", "the lease of a plain claim never ends"),
    ("guard/claim", "a plain claim belongs to all"),
    ("guard/complete", "a plain claim has no token"),
    ("guard/complete", "what a plain command completed has no token"),
    ("guard/mark", "a plain mark belongs to all"),
    ("guard/claim", "a plain mark has no token"),
    ("guard/claim", "what a plain mark says is free"),
]
"""The same, of records of plain commands."""
