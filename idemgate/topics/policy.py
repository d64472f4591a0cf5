"""What a topic does with its triggers, checked once and encoded once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import index
from typing import Any, Literal, TypedDict, cast

import msgpack

from idemgate.core.backoff import Backoff, BackoffPolicy, delays
from idemgate.core.codec.decoding import as_ours, unpacked
from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics.adaptive import Adaptive
from idemgate.topics.merge import Merge, MergeSpec, merge_of, merge_of_spec
from idemgate.topics.rate import Rate, rate_of, share

__all__ = [
    "Edge",
    "Policy",
    "check_slots",
    "differing",
    "from_stored",
    "policy_of",
    "reconciled",
    "slots_of",
    "with_slots",
]

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
    priority: bool
    priority_boost: int | None
    group_concurrency: int
    concurrency: int | None
    rate: Fraction | None
    burst: int
    adaptive: Adaptive | None

    def stored(self) -> bytes:
        """What the registry keeps and compares: everything that changes what a trigger means."""
        facts = {
            "edge": self.edge, "max_delay": self.max_delay, "max_size": self.max_size, "merge": self.merge.spec,
            "quiet": self.quiet, "remember": self.remember, "slots": self.slots, "window": self.window,
            "priority": self.priority or None, "priority_boost": self.priority_boost, "concurrency": self.concurrency,
            "group_concurrency": self.group_concurrency if self.group_concurrency > 1 else None,
            "rate": None if self.rate is None else str(self.rate), "burst": None if self.rate is None else self.burst,
        }  # fmt: skip
        return _packed({name: value for name, value in facts.items() if value is not None})

    def for_scripts(self) -> bytes:
        """ARGV[3] of the scripts that change a slot: `lua/lib/policy.lua`."""
        return _packed(self._rules() | {
            "attempts": self.max_attempts, "retention": self.retention, "max_dead": self.max_dead,
        })  # fmt: skip

    def for_triggers(self) -> bytes:
        """As `for_scripts`, without what is only needed once messages are taken."""
        return _packed(self._rules())

    def _rules(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "merge": self.merge.spec, "remember": self.remember, "group_limit": self.group_concurrency,
        }  # fmt: skip
        for name in ("window", "quiet", "max_delay", "max_size"):
            if getattr(self, name) is not None:
                facts[name] = getattr(self, name)
        flags = {
            "leading": self.edge == "leading", "raw": self.merge.raw, "ranked": self.priority,
            "limited": self.concurrency is not None,
        }  # fmt: skip
        facts |= {name: True for name, given in flags.items() if given}
        if self.priority_boost is not None:
            facts["boost"] = self.priority_boost
        return facts

    def described(self) -> dict[str, object]:
        """What is stored of it and was said, as people wrote it: durations in seconds."""
        facts = _unpacked(self.stored())
        facts["merge"] = _spoken(facts["merge"])
        return {name: _shown(name, value) for name, value in facts.items()}

    def limits(self, slot: int) -> tuple[int, int, int]:
        """What a slot may have: deliveries in flight (0 = any number), us between two (0 = any rate), burst."""
        most = 0 if self.concurrency is None else share(self.concurrency, slot, self.slots)
        if self.rate is None:
            return most, 0, 0
        return most, max(1, round(1_000_000 * self.slots / self.rate)), max(1, share(self.burst, slot, self.slots))


class ExpiryOptions(TypedDict, total=False):
    """The options of a topic that `gate.expiry` takes; `gate.topic` documents them."""

    slots: int
    lease: Duration
    max_attempts: int
    backoff: BackoffPolicy


class MergeOptions(ExpiryOptions, total=False):
    """The options of a topic that `gate.merge` takes; `gate.topic` documents them."""

    window: Duration | None
    quiet: Duration | None
    max_delay: Duration | None
    max_size: int | None
    edge: Edge
    merge: MergeSpec
    retention: Duration


class TopicOptions(MergeOptions, total=False):
    """The options of `gate.topic`, which documents them."""

    max_dead: int
    remember: Duration
    priority: bool
    priority_boost: Duration | None
    group_concurrency: int
    concurrency: int | None
    rate: Rate | None
    burst: int | None
    adaptive: Adaptive | None


def policy_from(function: str, options: TopicOptions | MergeOptions) -> tuple[Policy, bool]:
    """Return the policy of these options, and whether it is the default one. Raises InvalidArgument, TypeError."""
    known = MergeOptions if function == "merge" else TopicOptions
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")
    policy = policy_of(**cast(TopicOptions, options))
    return policy, policy.stored() == DEFAULT.stored()


def policy_of(
    *,
    window: Duration | None = None,
    quiet: Duration | None = None,
    max_delay: Duration | None = None,
    max_size: int | None = None,
    edge: Edge = "trailing",
    merge: MergeSpec = "last",
    slots: int = 1,
    lease: Duration = "30s",
    max_attempts: int = 17,
    backoff: BackoffPolicy = None,
    retention: Duration = "30d",
    max_dead: int = 10_000,
    remember: Duration = "24h",
    priority: bool = False,
    priority_boost: Duration | None = None,
    group_concurrency: int = 1,
    concurrency: int | None = None,
    rate: Rate | None = None,
    burst: int | None = None,
    adaptive: Adaptive | None = None,
) -> Policy:
    """Checks what a user asked for. InvalidArgument names the parameter, its value and the fix."""
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
        priority=bool(priority) or priority_boost is not None,
        priority_boost=_ms(priority_boost, "priority_boost"),
        group_concurrency=_positive(group_concurrency, "group_concurrency"),
        concurrency=None if concurrency is None else _positive(concurrency, "concurrency"),
        rate=None if rate is None else rate_of(rate),
        burst=_burst(rate, burst),
        adaptive=_adaptive(adaptive),
    )
    _check_together(policy)
    _check_limits(policy)
    return policy


def from_stored(stored: bytes, local: Policy) -> Policy:
    """The stored policy, with what is not stored (lease, attempts, backoff, retention) taken from `local`.
    DecodeError for what is none."""
    facts = _unpacked(stored)
    with as_ours("a policy"):
        return replace(
            local,
            window=_number_in(facts, "window"),
            quiet=_number_in(facts, "quiet"),
            max_delay=_number_in(facts, "max_delay"),
            max_size=_number_in(facts, "max_size"),
            priority_boost=_number_in(facts, "priority_boost"),
            group_concurrency=_number_in(facts, "group_concurrency") or 1,
            concurrency=_number_in(facts, "concurrency"),
            burst=_number_in(facts, "burst") or 1,
            merge=merge_of_spec(facts["merge"]),
            edge=_one_of(facts["edge"], ("trailing", "leading")),
            slots=_power_of_two(facts["slots"]),
            remember=index(facts["remember"]),
            priority=_one_of(facts.get("priority", False), (False, True)),
            rate=Fraction(_one_of(facts["rate"], _RATE)) if "rate" in facts else None,
        )


_RATE = re.compile(r"[0-9]{1,30}(/[0-9]{1,30})?", re.ASCII)


def _number_in(facts: dict[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return None if value is None else _positive(value, name)


def _one_of(value: Any, allowed: tuple[object, ...] | re.Pattern[str]) -> Any:
    fits = allowed.fullmatch(value) if isinstance(allowed, re.Pattern) else value in allowed
    if not fits:
        raise ValueError(f"{value!r} is not one of its values")
    return value


def slots_of(stored: bytes) -> int:
    """The number of slots of a stored policy. DecodeError for what is none."""
    with as_ours("a policy"):
        return _power_of_two(_unpacked(stored)["slots"])


def with_slots(stored: bytes, slots: int) -> bytes:
    """The stored policy with another number of slots, and else the same bytes."""
    return _packed(_unpacked(stored) | {"slots": slots})


def check_slots(policy: Policy, slots: int) -> int:
    """The number of slots that a policy may be given, or InvalidArgument."""
    _check_limits(replace(policy, slots=_power_of_two(slots)))
    return slots


def reconciled(known: Policy, said: Policy) -> Policy:
    """One topic declared twice in one program: what was said of lease, attempts and dead letters counts, wherever it
    was said; InvalidArgument where two different things were. A backoff is taken from whoever names one."""
    chosen: dict[str, Any] = {}
    for name, silent in _LOCAL.items():
        before, after = getattr(known, name), getattr(said, name)
        if silent not in (before, after) and before != after:
            raise InvalidArgument(
                name, after, f"this program said {before} before", "Say it once, where the topic is declared"
            )
        chosen[name] = after if before == silent else before
    if isinstance(known.backoff, type(delays(None))):
        chosen["backoff"] = said.backoff
    return replace(known, **chosen)


_LOCAL = {"lease": 30_000, "max_attempts": 17, "retention": 2_592_000_000, "max_dead": 10_000, "adaptive": None}
"""What each program says for itself, and what it says by saying nothing. Durations in ms."""


def differing(stored: bytes, asked: bytes) -> tuple[dict[str, object], dict[str, object]]:
    """The facts in which two policies differ, as people wrote them: durations in seconds, None = not set."""
    before, after = _unpacked(stored), _unpacked(asked)
    with as_ours("a policy"):
        names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
        was, to = ({name: _shown(name, facts.get(name)) for name in names} for facts in (before, after))
        return was, to


def _shown(name: str, value: Any) -> object:
    return (
        value / 1000
        if name in ("window", "quiet", "max_delay", "remember", "priority_boost") and value is not None
        else value
    )


def _spoken(spec: dict[str, Any]) -> object:
    if spec["op"] != "fields":
        return spec["op"] if spec.get("cap") is None else f"{spec['op']}({spec['cap']})"
    return {name: _spoken(part) for name, part in (*spec["fields"].items(), ("*", spec["rest"]))}


def _unpacked(stored: bytes) -> dict[str, Any]:
    """As `stored` wrote it; DecodeError for what is no map."""
    facts = unpacked(stored, "a policy", raw=False)
    if not isinstance(facts, dict):
        raise DecodeError("it is not a policy of ours")
    return cast("dict[str, Any]", facts)


def _check_together(policy: Policy) -> None:
    if policy.window is not None and policy.quiet is not None:
        raise InvalidArgument(
            "quiet",
            policy.quiet / 1000,
            "a topic has a window or a quiet time, not both",
            "Drop one of window and quiet",
        )
    if policy.edge not in ("trailing", "leading"):
        raise InvalidArgument("edge", policy.edge, "no such edge", 'Use "trailing" or "leading"')
    if policy.max_delay is not None and policy.quiet is None:
        raise InvalidArgument(
            "max_delay",
            policy.max_delay / 1000,
            "only bounds a quiet time",
            "Add quiet=, or drop max_delay (a window never grows)",
        )
    if policy.max_delay is not None and policy.quiet is not None and policy.max_delay < policy.quiet:
        raise InvalidArgument(
            "max_delay",
            policy.max_delay / 1000,
            f"shorter than quiet ({policy.quiet / 1000} s)",
            "Make it at least as long as quiet",
        )
    timed = policy.window is not None or policy.quiet is not None
    if policy.max_size is not None and not timed:
        raise InvalidArgument(
            "max_size",
            policy.max_size,
            "there is no window to cut short",
            "Add window= or quiet=, or drop max_size",
        )
    if policy.edge == "leading":
        if not timed:
            raise InvalidArgument(
                "edge",
                policy.edge,
                "there is no window whose leading edge it could be",
                "Add window= or quiet=",
            )
        if policy.max_delay is not None or policy.max_size is not None:
            raise InvalidArgument(
                "edge",
                policy.edge,
                "max_delay and max_size bound a trailing edge",
                "Drop them, or use edge='trailing'",
            )


def _burst(rate: Rate | None, burst: int | None) -> int:
    if burst is not None:
        if rate is None:
            raise InvalidArgument(
                "burst", burst, "there is no rate that it could belong to", "Add rate=, or drop burst"
            )
        return _positive(burst, "burst")
    return 1 if rate is None else max(1, round(rate_of(rate) / 10))


def _adaptive(given: Adaptive | None) -> Adaptive | None:
    if given is not None and not isinstance(given, Adaptive):
        raise InvalidArgument("adaptive", given, "not an adaptive limit", "Pass Adaptive(), or Adaptive(most=50)")
    return given


def _check_limits(policy: Policy) -> None:
    if policy.concurrency is not None and policy.concurrency < policy.slots:
        raise InvalidArgument(
            "concurrency", policy.concurrency, f"less than the {policy.slots} slots, among which it is shared out",
            "Allow at least one delivery a slot, or use fewer slots",
        )  # fmt: skip


def _ms(value: Duration | None, name: str) -> int | None:
    return None if value is None else milliseconds(value, name)


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(name, value, "not a positive whole number", "Use an int of at least 1")
    return value


def _power_of_two(slots: int) -> int:
    if not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= 16_384 or slots & (slots - 1):
        raise InvalidArgument("slots", slots, "not a power of two from 1 to 16,384", "Use 1, 2, 4, 8, ...")
    return slots


def _packed(value: object) -> bytes:
    return msgpack.packb(value)


DEFAULT: Policy = policy_of()
"""The policy of `gate.topic(name)` without options."""
