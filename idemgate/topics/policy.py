"""The policy of a topic: checked once and encoded once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import index
from typing import Any, Literal, TypedDict, Unpack, cast

import msgpack

from idemgate.core.backoff import Backoff, BackoffPolicy, delays
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.durations import Duration, lease_milliseconds, milliseconds
from idemgate.core.history import check_history
from idemgate.core.validation import MOST, check_int
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics.limits import Adaptive, Rate, rate_of, share
from idemgate.topics.merge import Merge, MergeSpec, merge_of, merge_of_spec

__all__ = [
    "Edge",
    "Policy",
    "check_slots",
    "diff_policies",
    "find_newer",
    "from_stored",
    "merge_declarations",
    "policy_of",
    "slots_of",
    "with_slots",
]

Edge = Literal["trailing", "leading"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A checked policy. Durations are in ms. None means no such limit."""

    # Stored: the same in all programs
    window: int | None
    quiet: int | None
    max_delay: int | None
    max_size: int | None
    edge: Edge
    merge: Merge
    slots: int
    dedup_retention: int
    priority: bool
    priority_boost: int | None
    group_concurrency: int
    concurrency: int | None
    rate: Fraction | None
    burst: int
    result_retention: int | None
    history: int | None
    revision: int
    # Not stored: those of each program
    lease: int
    max_attempts: int
    backoff: Backoff
    dead_retention: int
    max_dead_letters: int
    adaptive: Adaptive | None
    retry_penalty: int

    def pack_stored(self) -> bytes:
        """Return the bytes that the registry stores and compares: all options that change the meaning of a trigger."""
        options = {
            "edge": self.edge, "max_delay": self.max_delay, "max_size": self.max_size, "merge": self.merge.spec,
            "quiet": self.quiet, "remember": self.dedup_retention, "slots": self.slots, "window": self.window,
            "priority": self.priority or None, "priority_boost": self.priority_boost, "concurrency": self.concurrency,
            "group_concurrency": self.group_concurrency if self.group_concurrency > 1 else None,
            "rate": None if self.rate is None else str(self.rate), "burst": None if self.rate is None else self.burst,
            "results": self.result_retention, "history": self.history, "revision": self.revision or None,
        }  # fmt: skip
        return _pack({name: value for name, value in options.items() if value is not None})

    def for_scripts(self, hidden: bool = False) -> bytes:
        """Return ARGV[3] of the scripts that change a slot; see `topics/scripts/lib/slot/slot.lua`.

        `hidden`: histories get digests of keys.
        """
        return _pack(self._trigger_rules(hidden) | {
            "attempts": self.max_attempts, "retention": self.dead_retention, "max_dead": self.max_dead_letters,
        } | ({"retry_penalty": self.retry_penalty} if self.retry_penalty else {}))  # fmt: skip

    def for_triggers(self, hidden: bool = False) -> bytes:
        """Return the part of `for_scripts` that accepting triggers needs."""
        return _pack(self._trigger_rules(hidden))

    def _trigger_rules(self, hidden: bool) -> dict[str, object]:
        options: dict[str, object] = {
            "merge": self.merge.spec, "remember": self.dedup_retention, "group_limit": self.group_concurrency,
        }  # fmt: skip
        for name in ("window", "quiet", "max_delay", "max_size"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        flags = {
            "leading": self.edge == "leading", "raw": self.merge.raw, "ranked": self.priority,
            "limited": self.concurrency is not None, "hidden": hidden,
        }  # fmt: skip
        options |= {name: True for name, given in flags.items() if given}
        if self.edge == "leading":
            options["attempts"] = self.max_attempts  # whether a lapsed delivery is retried
        if self.priority_boost is not None:
            options["boost"] = self.priority_boost
        if self.result_retention is not None:
            options["results"] = self.result_retention
        if self.history is not None:
            options["history"] = self.history
        return options

    def describe(self) -> dict[str, object]:
        """Return the stored options by parameter name, durations in seconds."""
        options = _unpack_policy(self.pack_stored())
        options["merge"] = _describe_merge(options["merge"])
        return {_option_name(name): _to_seconds(name, value) for name, value in options.items()}

    def slot_limits(self, slot: int) -> tuple[int, int, int]:
        """Return the limits of one slot.

        Returns:
            The deliveries in flight (0 = unlimited), the us between two deliveries (0 = unlimited), and the burst.
        """
        most = 0 if self.concurrency is None else share(self.concurrency, slot, self.slots)
        if self.rate is None:
            return most, 0, 0
        return most, max(1, round(1_000_000 * self.slots / self.rate)), max(1, share(self.burst, slot, self.slots))


class ExpiryOptions(TypedDict, total=False):
    """The options of a topic that `gate.on_expired` takes; `gate.topic` documents them."""

    lease: Duration
    max_attempts: int
    backoff: BackoffPolicy
    slots: int


class TopicOptions(ExpiryOptions, total=False):
    """The options of `gate.topic` and `gate.merge`; `gate.topic` documents them."""

    # When a message is delivered
    window: Duration | None
    quiet: Duration | None
    max_delay: Duration | None
    max_size: int | None
    edge: Edge
    merge: MergeSpec
    # What happens after a failure: with those of ExpiryOptions
    dead_retention: Duration
    max_dead_letters: int
    # In which order and how fast
    concurrency: int | None
    group_concurrency: int
    rate: Rate | None
    burst: int | None
    adaptive: Adaptive | None
    priority: bool
    priority_boost: Duration | None
    retry_penalty: int
    # What is stored
    dedup_retention: Duration
    result_retention: Duration | None
    history: int | None
    revision: int


def policy_from(function: str, options: TopicOptions) -> tuple[Policy, bool]:
    """Return the policy of these options, and whether it is the default one. Raises InvalidArgument, TypeError."""
    if unknown := options.keys() - TopicOptions.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")
    if not options:
        return DEFAULT, True
    policy = policy_of(**options)
    return policy, policy.pack_stored() == DEFAULT.pack_stored()


_DEFAULTS: dict[str, Any] = {
    "window": None, "quiet": None, "max_delay": None, "max_size": None, "edge": "trailing", "merge": "last", "slots": 1,
    "lease": "30s", "max_attempts": 17, "backoff": None, "dead_retention": "30d", "max_dead_letters": 10_000,
    "dedup_retention": "24h", "priority": False, "priority_boost": None, "retry_penalty": 0, "group_concurrency": 1,
    "concurrency": None, "rate": None, "burst": None, "adaptive": None,
    "result_retention": None, "history": None, "revision": 0,
}  # fmt: skip


def policy_of(**options: Unpack[TopicOptions]) -> Policy:
    """Check the options of a topic and build its policy. Raises InvalidArgument."""
    given: dict[str, Any] = {**_DEFAULTS, **options}
    priority = bool(given["priority"]) or given["priority_boost"] is not None
    policy = Policy(
        window=_ms(given["window"], "window"),
        quiet=_ms(given["quiet"], "quiet"),
        max_delay=_ms(given["max_delay"], "max_delay"),
        max_size=None if given["max_size"] is None else _positive(given["max_size"], "max_size"),
        edge=given["edge"],
        merge=merge_of(given["merge"]),
        slots=_power_of_two(given["slots"]),
        lease=lease_milliseconds(given["lease"]),
        max_attempts=_positive(given["max_attempts"], "max_attempts"),
        backoff=delays(given["backoff"]),
        dead_retention=milliseconds(given["dead_retention"], "dead_retention"),
        max_dead_letters=_positive(given["max_dead_letters"], "max_dead_letters"),
        dedup_retention=milliseconds(given["dedup_retention"], "dedup_retention"),
        priority=priority,
        priority_boost=_ms(given["priority_boost"], "priority_boost"),
        retry_penalty=_check_penalty(given["retry_penalty"], priority),
        group_concurrency=_positive(given["group_concurrency"], "group_concurrency"),
        concurrency=None if given["concurrency"] is None else _positive(given["concurrency"], "concurrency"),
        rate=None if given["rate"] is None else rate_of(given["rate"]),
        burst=_default_burst(given["rate"], given["burst"]),
        adaptive=_check_adaptive(given["adaptive"]),
        result_retention=_ms(given["result_retention"], "result_retention"),
        history=None if given["history"] is None else check_history(given["history"]),
        revision=_check_revision(given["revision"]),
    )
    _check_together(policy)
    _check_quiet_is_bounded(policy, options)
    _check_limits(policy)
    return policy


def from_stored(stored: bytes, local: Policy) -> Policy:
    """Build a policy from stored bytes. Options that are not stored come from `local`. Raises DecodeError."""
    options = _unpack_policy(stored)
    with wrap_decode_errors("a policy"):
        return replace(
            local,
            window=_read_number(options, "window"),
            quiet=_read_number(options, "quiet"),
            max_delay=_read_number(options, "max_delay"),
            max_size=_read_number(options, "max_size"),
            priority_boost=_read_number(options, "priority_boost"),
            group_concurrency=_read_number(options, "group_concurrency") or 1,
            concurrency=_read_number(options, "concurrency"),
            burst=_read_number(options, "burst") or 1,
            result_retention=_read_number(options, "results"),
            history=None if options.get("history") is None else check_history(options["history"]),
            revision=_read_number(options, "revision") or 0,
            merge=merge_of_spec(options["merge"]),
            edge=_check_one_of(options["edge"], ("trailing", "leading")),
            slots=_power_of_two(options["slots"]),
            dedup_retention=index(options["remember"]),
            priority=_check_one_of(options.get("priority", False), (False, True)),
            rate=Fraction(_check_one_of(options["rate"], _RATE)) if "rate" in options else None,
        )


_RATE = re.compile(r"[0-9]{1,30}(/[0-9]{1,30})?", re.ASCII)


def _read_number(options: dict[str, Any], name: str) -> int | None:
    value = options.get(name)
    return None if value is None else _positive(value, name)


def _check_one_of(value: Any, allowed: tuple[object, ...] | re.Pattern[str]) -> Any:
    fits = allowed.fullmatch(value) if isinstance(allowed, re.Pattern) else value in allowed
    if not fits:
        raise ValueError(f"{value!r} is not one of its values")
    return value


def find_newer(stored: bytes, policy: Policy) -> Policy | None:
    """Return the stored policy if its revision is higher and it merges alike, else None. Raises DecodeError.

    The number of slots stays that of `policy`.
    """
    found = from_stored(stored, policy)
    if found.revision <= policy.revision or found.merge.spec != policy.merge.spec:
        return None
    return replace(found, slots=policy.slots)


def slots_of(stored: bytes) -> int:
    """Return the number of slots of a stored policy. Raises DecodeError."""
    with wrap_decode_errors("a policy"):
        return _power_of_two(_unpack_policy(stored)["slots"])


def with_slots(stored: bytes, slots: int) -> bytes:
    """Return the stored policy with another number of slots; all other bytes stay the same."""
    return _pack(_unpack_policy(stored) | {"slots": slots})


def check_slots(policy: Policy, slots: int) -> int:
    """Return the number of slots if the policy allows it. Raises InvalidArgument."""
    _check_limits(replace(policy, slots=_power_of_two(slots)))
    return slots


def merge_declarations(known: Policy, declared: Policy) -> Policy:
    """Merge two declarations of one topic in one program.

    An option that is not stored may differ from its default in one of them, or in both with the same value. Else it
    raises InvalidArgument. The backoff is that of the first declaration that has one.
    """
    chosen: dict[str, Any] = {}
    for name in _LOCAL:
        silent = getattr(DEFAULT, name)
        before, after = getattr(known, name), getattr(declared, name)
        if silent not in (before, after) and before != after:
            raise InvalidArgument(
                name, after, f"this program declared {before} before", "Say it once, where the topic is declared"
            )
        chosen[name] = after if before == silent else before
    if isinstance(known.backoff, type(delays(None))):
        chosen["backoff"] = declared.backoff
    return replace(known, **chosen)


_LOCAL = ("lease", "max_attempts", "dead_retention", "max_dead_letters", "adaptive", "retry_penalty")
"""Options that are not stored. The backoff is merged apart."""


def diff_policies(stored: bytes, asked: bytes) -> tuple[dict[str, object], dict[str, object]]:
    """Return the options in which two stored policies differ, durations in seconds. None means not set."""
    before, after = _unpack_policy(stored), _unpack_policy(asked)
    with wrap_decode_errors("a policy"):
        names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
        was, to = (
            {_option_name(name): _to_seconds(name, options.get(name)) for name in names} for options in (before, after)
        )
        return was, to


_OPTION_NAMES = {"remember": "dedup_retention", "results": "result_retention"}
"""Options whose stored name differs from the name of the parameter."""


def _option_name(stored_name: str) -> str:
    return _OPTION_NAMES.get(stored_name, stored_name)


def _to_seconds(name: str, value: Any) -> object:
    return (
        value / 1000
        if name in ("window", "quiet", "max_delay", "remember", "priority_boost", "results") and value is not None
        else value
    )


def _describe_merge(spec: dict[str, Any]) -> object:
    if spec["op"] != "fields":
        return spec["op"] if spec.get("cap") is None else f"{spec['op']}({spec['cap']})"
    return {name: _describe_merge(part) for name, part in (*spec["fields"].items(), ("*", spec["rest"]))}


def _unpack_policy(stored: bytes) -> dict[str, Any]:
    """Unpack what `pack_stored` wrote. Raises DecodeError."""
    options = unpack(stored, "a policy", raw=False)
    if not isinstance(options, dict):
        raise DecodeError("expected a policy, got another type")
    return cast("dict[str, Any]", options)


def _check_revision(revision: int) -> int:
    check_int("revision", revision, 0)
    if revision > MOST:
        raise InvalidArgument("revision", revision, "too large", f"Use at most {MOST}")
    return revision


def _check_penalty(penalty: int, priority: bool) -> int:
    check_int("retry_penalty", penalty, 0)
    if penalty and not priority:
        raise InvalidArgument("retry_penalty", penalty, "the topic has no priorities", "Add priority=True")
    if penalty > 1_000_000:
        raise InvalidArgument("retry_penalty", penalty, "too many points", "Use at most 1,000,000")
    return penalty


def _check_quiet_is_bounded(policy: Policy, options: TopicOptions) -> None:
    """Raise InvalidArgument for a quiet time without a bound, unless the caller passes `max_delay=None`."""
    if policy.quiet is not None and policy.max_size is None and "max_delay" not in options:
        raise InvalidArgument(
            "quiet", policy.quiet / 1000, "a key that is triggered more often than this is never delivered",
            'Add max_delay="1m" or max_size=100, or max_delay=None to accept it',
        )  # fmt: skip


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


def _default_burst(rate: Rate | None, burst: int | None) -> int:
    if burst is not None:
        if rate is None:
            raise InvalidArgument(
                "burst", burst, "there is no rate that it could belong to", "Add rate=, or drop burst"
            )
        return _positive(burst, "burst")
    return 1 if rate is None else max(1, round(rate_of(rate) / 10))


def _check_adaptive(given: Adaptive | None) -> Adaptive | None:
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
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        fix = f"Use at most {MOST}" if isinstance(value, int) and value > MOST else "Use an int of at least 1"
        raise InvalidArgument(name, value, "not a positive whole number", fix)
    return value


def _power_of_two(slots: int) -> int:
    if not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= 16_384 or slots & (slots - 1):
        raise InvalidArgument("slots", slots, "not a power of two from 1 to 16,384", "Use 1, 2, 4, 8, ...")
    return slots


def _pack(value: object) -> bytes:
    return msgpack.packb(value)


DEFAULT: Policy = policy_of()
"""The policy of `gate.topic(name)` without options."""
