"""What a topic does with its triggers, checked once and encoded once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import msgpack

from idemgate.core.backoff import Backoff, BackoffPolicy, delays
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.merging import Merge, MergeSpec, merge_of, merge_of_spec
from idemgate.errors import BadInput

__all__ = ["Edge", "Policy", "differing", "from_stored", "policy_of", "reconciled"]

Edge = Literal["trailing", "leading"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A checked policy. Durations in ms; None = not limited that way."""

    window: int | None
    quiet: int | None
    max_delay: int | None
    max_size: int | None
    edge: Edge
    merge: Merge
    slots: int
    lease: int
    max_attempts: int
    backoff: Backoff
    retention: int
    max_dead: int
    remember: int

    def stored(self) -> bytes:
        """What the registry keeps and compares: everything that changes what a trigger means."""
        facts = {
            "edge": self.edge, "max_delay": self.max_delay, "max_size": self.max_size, "merge": self.merge.spec,
            "quiet": self.quiet, "remember": self.remember, "slots": self.slots, "window": self.window,
        }  # fmt: skip
        return _packed({name: value for name, value in facts.items() if value is not None})

    def for_trigger(self) -> bytes:
        """ARGV[3] of `topic/trigger`."""
        facts: dict[str, object] = {"merge": self.merge.spec, "remember": self.remember}
        for name in ("window", "quiet", "max_delay", "max_size"):
            if getattr(self, name) is not None:
                facts[name] = getattr(self, name)
        if self.edge == "leading":
            facts["leading"] = True
        if self.merge.raw:
            facts["raw"] = True
        return _packed(facts)

    def for_merge(self) -> bytes:
        """The merge policy alone, as scripts take it."""
        return _packed(self.merge.spec)


def policy_of(
    *,
    window: Duration | None,
    quiet: Duration | None,
    max_delay: Duration | None,
    max_size: int | None,
    edge: Edge,
    merge: MergeSpec,
    slots: int,
    lease: Duration,
    max_attempts: int,
    backoff: BackoffPolicy,
    retention: Duration,
    max_dead: int,
    remember: Duration,
) -> Policy:
    """Checks what a user asked for. BadInput names the parameter, its value and the fix."""
    policy = Policy(
        window=_ms(window, "window"),
        quiet=_ms(quiet, "quiet"),
        max_delay=_ms(max_delay, "max_delay"),
        max_size=None if max_size is None else _positive(max_size, "max_size"),
        edge=edge,
        merge=merge_of(merge),
        slots=_power_of_two(slots),
        lease=milliseconds(lease, "lease"),
        max_attempts=_positive(max_attempts, "max_attempts"),
        backoff=delays(backoff),
        retention=milliseconds(retention, "retention"),
        max_dead=_positive(max_dead, "max_dead"),
        remember=milliseconds(remember, "remember"),
    )
    _check_together(policy)
    return policy


def from_stored(stored: bytes, local: Policy) -> Policy:
    """The stored policy, with what is not stored (lease, attempts, backoff, retention) taken from `local`."""
    facts = _unpacked(stored)
    merge = merge_of_spec(facts.pop("merge"))
    return replace(
        local,
        merge=merge,
        window=facts.get("window"),
        quiet=facts.get("quiet"),
        max_delay=facts.get("max_delay"),
        max_size=facts.get("max_size"),
        edge=facts["edge"],
        slots=facts["slots"],
        remember=facts["remember"],
    )


def reconciled(known: Policy, said: Policy) -> Policy:
    """One topic declared twice in one program: what was said of lease, attempts and dead letters counts, wherever it
    was said; BadInput where two different things were. A backoff is taken from whoever names one."""
    chosen: dict[str, Any] = {}
    for name, silent in _LOCAL.items():
        before, after = getattr(known, name), getattr(said, name)
        if silent not in (before, after) and before != after:
            raise BadInput(
                name, after, f"this program said {before} before", "Say it once, where the topic is declared"
            )
        chosen[name] = after if before == silent else before
    if isinstance(known.backoff, type(delays(None))):
        chosen["backoff"] = said.backoff
    return replace(known, **chosen)


_LOCAL = {"lease": 30_000, "max_attempts": 17, "retention": 2_592_000_000, "max_dead": 10_000}
"""What each program says for itself, and what it says by saying nothing. Durations in ms."""


def differing(stored: bytes, asked: bytes) -> tuple[dict[str, object], dict[str, object]]:
    """The facts in which two policies differ, as people wrote them: durations in seconds, None = not set."""
    before, after = _unpacked(stored), _unpacked(asked)
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    return {name: _shown(name, before.get(name)) for name in names}, {
        name: _shown(name, after.get(name)) for name in names
    }


def _shown(name: str, value: Any) -> object:
    return value / 1000 if name in ("window", "quiet", "max_delay", "remember") and value is not None else value


def _unpacked(stored: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", msgpack.unpackb(stored))


def _check_together(policy: Policy) -> None:
    if policy.window is not None and policy.quiet is not None:
        raise BadInput(
            "quiet",
            policy.quiet / 1000,
            "a topic has a window or a quiet time, not both",
            "Drop one of window and quiet",
        )
    if policy.edge not in ("trailing", "leading"):
        raise BadInput("edge", policy.edge, "no such edge", 'Use "trailing" or "leading"')
    if policy.max_delay is not None and policy.quiet is None:
        raise BadInput(
            "max_delay",
            policy.max_delay / 1000,
            "only bounds a quiet time",
            "Add quiet=, or drop max_delay (a window never grows)",
        )
    if policy.max_delay is not None and policy.quiet is not None and policy.max_delay < policy.quiet:
        raise BadInput(
            "max_delay",
            policy.max_delay / 1000,
            f"shorter than quiet ({policy.quiet / 1000} s)",
            "Make it at least as long as quiet",
        )
    timed = policy.window is not None or policy.quiet is not None
    if policy.max_size is not None and not timed:
        raise BadInput(
            "max_size",
            policy.max_size,
            "there is no window to cut short",
            "Add window= or quiet=, or drop max_size",
        )
    if policy.edge == "leading":
        if not timed:
            raise BadInput(
                "edge",
                policy.edge,
                "there is no window whose leading edge it could be",
                "Add window= or quiet=",
            )
        if policy.max_delay is not None or policy.max_size is not None:
            raise BadInput(
                "edge",
                policy.edge,
                "max_delay and max_size bound a trailing edge",
                "Drop them, or use edge='trailing'",
            )


def _ms(value: Duration | None, name: str) -> int | None:
    return None if value is None else milliseconds(value, name)


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(name, value, "not a positive whole number", "Use an int of at least 1")
    return value


def _power_of_two(slots: int) -> int:
    if not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= 16_384 or slots & (slots - 1):
        raise BadInput("slots", slots, "not a power of two from 1 to 16,384", "Use 1, 2, 4, 8, ...")
    return slots


def _packed(value: object) -> bytes:
    return msgpack.packb(value)
