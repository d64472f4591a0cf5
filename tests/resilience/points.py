"""Fail points: places at which a process kills itself with SIGKILL, as a power cut or an out-of-memory killer would.

They are put around the links of a process that is to die, and nowhere else: the package knows nothing of them. A
place is "before topics/take 2": instead of sending the second call of that script; "after topics/take 2": its reply was
read, and nothing was done with it yet; or "after effect": a place that the scene itself names with `reach`. A
"topics/settle_and_take" is a "topics/settle", too.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from idemgate.core.calls import Batch, Call
from idemgate.store.aio import AsyncLink
from idemgate.store.sync import SyncLink

__all__ = ["install", "reach", "reached", "times"]

_Sent = Call[Any] | Batch[Any] | Sequence[Batch[Any]]

_place = ""
_reached: Counter[str] = Counter()
_sent: dict[int, Call[Any]] = {}


def reach(place: str) -> None:
    """Dies here if this is the place, for the n-th time: "after effect 2"; the first time needs no number."""
    _reached[place] += 1
    if _place in (f"{place} {_reached[place]}", place):
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def times(place: str) -> int:
    """How often it was reached."""
    return _reached[place]


def reached() -> dict[str, int]:
    """All places, and how often."""
    return dict(_reached)


def install(place: str) -> None:
    """Makes this process die at that place; "" never."""
    global _place  # noqa: PLW0603 - one process, one death
    _place = place
    for link in (SyncLink, AsyncLink):
        for name in ("run", "start", "run_all", "try_each"):
            if hasattr(link, name):
                setattr(link, name, _before(getattr(link, name)))
    answer = Call.answer

    def answered(self: Call[Any], reply: Any) -> Any:
        for name in _names(self):
            reach(f"after {name}")
        return answer(self, reply)

    Call.answer = answered  # type: ignore[method-assign]


def _before(send: Any) -> Any:
    def sending(self: Any, what: _Sent, *args: Any, **kwargs: Any) -> Any:
        for call in _new(_calls_of(what)):
            for name in _names(call):
                reach(f"before {name}")
        return send(self, what, *args, **kwargs)

    return sending


def _calls_of(what: _Sent) -> list[Call[Any]]:
    if isinstance(what, Call):
        return [what]
    return [*what.calls] if isinstance(what, Batch) else [call for batch in what for call in batch.calls]


def _names(call: Call[Any]) -> tuple[str, ...]:
    name = call.script.name
    return (name, "topics/settle") if name == "topics/settle_and_take" else (name,)


def _new(calls: Iterable[Call[Any]]) -> list[Call[Any]]:
    """Those that were not seen yet: `run` may be made of `start`."""
    found = [call for call in calls if id(call) not in _sent]
    _sent.update((id(call), call) for call in found)
    return found
