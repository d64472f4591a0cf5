"""What a topic's policy may say, and how it is written down."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from typing import Any

import msgpack
import pytest

from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics.limits import Adaptive
from idemgate.topics.merge import append
from idemgate.topics.policy import (
    _LOCAL,
    DEFAULT,
    Policy,
    TopicOptions,
    diff_policies,
    find_newer,
    from_stored,
    merge_declarations,
    policy_of,
)
from tests.for_each import for_each


def policy(**facts: Any) -> Policy:
    """A policy whose quiet time may go on for ever."""
    return policy_of(**({"max_delay": None} | facts))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"window": "1s", "quiet": "1s"}, "quiet", "Drop one of window and quiet"),
    ({"max_delay": "1s"}, "max_delay", "only bounds a quiet time"),
    ({"window": "1s", "max_delay": "2s"}, "max_delay", "only bounds a quiet time"),
    ({"quiet": "2s", "max_delay": "1s"}, "max_delay", "shorter than quiet (2.0 s)"),
    ({"max_size": 5}, "max_size", "there is no window to cut short"),
    ({"window": "1s", "max_size": 0}, "max_size", "at least 1"),
    ({"window": "1s", "max_size": 2.5}, "max_size", "at least 1"),
    ({"window": "1s", "max_size": True}, "max_size", "at least 1"),
    ({"edge": "leading"}, "edge", "no window whose leading edge"),
    ({"window": "1s", "edge": "both"}, "edge", "no such edge"),
    ({"window": "1s", "max_size": 5, "edge": "leading"}, "edge", "bound a trailing edge"),
    ({"quiet": "1s", "max_delay": "5s", "edge": "leading"}, "edge", "bound a trailing edge"),
    ({"slots": 0}, "slots", "power of two"),
    ({"slots": 3}, "slots", "power of two"),
    ({"slots": 32_768}, "slots", "power of two"),
    ({"slots": True}, "slots", "power of two"),
    ({"slots": "8"}, "slots", "power of two"),
    ({"max_attempts": 0}, "max_attempts", "at least 1"),
    ({"max_dead_letters": -1}, "max_dead_letters", "at least 1"),
    ({"window": -1}, "window", ""),
    ({"window": 0}, "window", ""),
    ({"quiet": float("nan")}, "quiet", ""),
    ({"lease": "soon"}, "lease", ""),
    ({"dead_retention": None}, "dead_retention", ""),
    ({"merge": "newest"}, "merge", "no such merge policy"),
    ({"priority_boost": 0}, "priority_boost", ""),
    ({"group_concurrency": 0}, "group_concurrency", "at least 1"),
    ({"concurrency": 0}, "concurrency", "at least 1"),
    ({"concurrency": 3, "slots": 4}, "concurrency", "less than the 4 slots"),
    ({"rate": "fast"}, "rate", "not a rate"),
    ({"rate": 0}, "rate", "out of range"),
    ({"burst": 5}, "burst", "no rate that it could belong to"),
    ({"burst": 0, "rate": 5}, "burst", "at least 1"),
    ({"history": 63}, "history", "not a number of transitions"),
    ({"history": 1001}, "history", "not a number of transitions"),
    ({"history": 0}, "history", ""),
]


@for_each(("facts", "name", "told"), REFUSED, ids=lambda part: str(part) if isinstance(part, dict) else "")
def test_a_policy_that_cannot_work_is_refused(facts: dict[str, Any], name: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        policy(**facts)
    assert refused.value.name == name
    assert told in str(refused.value)


WORKING: list[dict[str, Any]] = [
    {},
    {"window": 2},
    {"window": "250ms", "max_size": 10, "slots": 16_384},
    {"quiet": timedelta(seconds=5), "max_delay": "5s", "max_size": 1},
    {"window": "1h", "edge": "leading"},
    {"quiet": "1s", "edge": "leading", "merge": "first"},
    {"merge": {"n": "sum", "a": append(5), "*": "first"}, "dedup_retention": "1m"},
    {"priority": True},
    {"priority_boost": "10s", "group_concurrency": 4},
    {"slots": 4, "concurrency": 4, "rate": "100/m", "burst": 7},
]


@for_each("facts", WORKING, ids=str)
def test_what_is_stored_is_read_back(facts: dict[str, Any]) -> None:
    made = policy(**facts)
    assert from_stored(made.pack_stored(), made) == made
    assert from_stored(made.pack_stored(), policy(lease="9s")).lease == 9000
    assert diff_policies(made.pack_stored(), made.pack_stored()) == ({}, {})


def test_an_option_of_a_later_version_is_ignored() -> None:
    stored = msgpack.unpackb(policy(window="60s", revision=2).pack_stored()) | {"of a later version": 5}
    assert from_stored(msgpack.packb(stored), DEFAULT).window == 60_000


STORED = [
    "edge", "max_delay", "max_size", "merge", "quiet", "remember", "slots", "window", "priority", "priority_boost",
    "concurrency", "group_concurrency", "rate", "burst", "results", "history", "revision",
]  # fmt: skip
"""The names of stored options in their order: policies are compared as bytes, with those of earlier versions, too."""
ALWAYS = {"edge": "trailing", "merge": {"op": "last"}, "remember": 86_400_000, "slots": 1}
EACH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"window": "2s"}, {"window": 2000}),
    "quiet": ({"quiet": "2s"}, {"quiet": 2000}),
    "max_delay": ({"quiet": "2s", "max_delay": "3s"}, {"quiet": 2000, "max_delay": 3000}),
    "max_size": ({"window": "2s", "max_size": 3}, {"window": 2000, "max_size": 3}),
    "edge": ({"window": "2s", "edge": "leading"}, {"window": 2000, "edge": "leading"}),
    "merge": ({"merge": "sum"}, {"merge": {"op": "sum"}}),
    "slots": ({"slots": 4}, {"slots": 4}),
    "dedup_retention": ({"dedup_retention": "1h"}, {"remember": 3_600_000}),
    "priority": ({"priority": True}, {"priority": True}),
    "priority_boost": ({"priority_boost": "2s"}, {"priority": True, "priority_boost": 2000}),
    "group_concurrency": ({"group_concurrency": 2}, {"group_concurrency": 2}),
    "concurrency": ({"concurrency": 4}, {"concurrency": 4}),
    "rate": ({"rate": "90/m"}, {"rate": "3/2", "burst": 1}),
    "burst": ({"rate": 5, "burst": 3}, {"rate": "5", "burst": 3}),
    "result_retention": ({"result_retention": "1h"}, {"results": 3_600_000}),
    "history": ({"history": 100}, {"history": 100}),
    "revision": ({"revision": 2}, {"revision": 2}),
    "lease": ({"lease": "9s"}, {}),
    "max_attempts": ({"max_attempts": 3}, {}),
    "backoff": ({"backoff": "9s"}, {}),
    "dead_retention": ({"dead_retention": "1d"}, {}),
    "max_dead_letters": ({"max_dead_letters": 5}, {}),
    "adaptive": ({"adaptive": Adaptive()}, {}),
    "retry_penalty": ({"retry_penalty": 1, "priority": True}, {"priority": True}),
}
"""For each option, arguments with another value than its default, and what they change of the stored policy."""


@for_each("option", TopicOptions.__annotations__)
def test_an_option_is_stored_or_it_is_that_of_each_program(option: str) -> None:
    given, changed = EACH[option]
    made, stored = policy(**given), ALWAYS | changed
    value = getattr(made, option)
    assert value != getattr(DEFAULT, option)
    assert made.pack_stored() == msgpack.packb({name: stored[name] for name in STORED if name in stored})
    adopted = from_stored(made.pack_stored(), DEFAULT)
    if option in {*_LOCAL, "backoff"}:
        # Then two declarations of one program share it
        assert getattr(adopted, option) == getattr(DEFAULT, option)
        assert getattr(merge_declarations(DEFAULT, made), option) == value
    else:
        assert getattr(adopted, option) == value
        if "Duration" in str(TopicOptions.__annotations__[option]):
            assert made.describe()[option] == value / 1000


def test_no_default_is_stored_that_an_earlier_version_did_not_store() -> None:
    assert policy().pack_stored() == msgpack.packb(ALWAYS)


def test_equal_policies_are_stored_as_equal_bytes() -> None:
    assert (
        policy(window="60s", merge={"a": "sum", "b": "max"}).pack_stored()
        == policy(window=timedelta(minutes=1), merge={"b": "max", "a": "sum"}).pack_stored()
    )


def test_a_difference_is_told_as_it_was_written() -> None:
    before = policy(window="60s", slots=4).pack_stored()
    after = policy(quiet="2s", max_delay=None, slots=4, merge="sum").pack_stored()
    assert diff_policies(before, after) == (
        {"window": 60.0, "quiet": None, "merge": {"op": "last"}},
        {"window": None, "quiet": 2.0, "merge": {"op": "sum"}},
    )


def test_a_script_is_told_what_it_needs_and_no_more() -> None:
    always = {
        "remember": 86_400_000, "attempts": 17, "retention": 2_592_000_000, "max_dead": 10_000, "group_limit": 1,
    }  # fmt: skip
    told = [
        (
            {"quiet": "1s", "max_delay": "3s", "merge": "sum"},
            {"quiet": 1000, "max_delay": 3000, "merge": {"op": "sum"}},
        ),
        (
            {"window": "1s", "edge": "leading"},
            {"window": 1000, "leading": True, "raw": True, "merge": {"op": "last"}},
        ),
        ({"merge": "first"}, {"raw": True, "merge": {"op": "first"}}),
        ({"merge": "max", "priority": True}, {"ranked": True, "merge": {"op": "max"}}),
        ({"merge": "max", "priority_boost": "2s"}, {"ranked": True, "boost": 2000, "merge": {"op": "max"}}),
        (
            {"merge": "max", "group_concurrency": 3, "concurrency": 5, "rate": 7},
            {"group_limit": 3, "limited": True, "merge": {"op": "max"}},
        ),
    ]
    for asked, wanted in told:
        assert msgpack.unpackb(policy(**asked).for_scripts()) == always | wanted


def test_a_slot_gets_its_share_of_the_limits() -> None:
    assert policy(slots=4).slot_limits(0) == (0, 0, 0)
    shares = [policy(slots=4, concurrency=6, rate="8/s", burst=9).slot_limits(slot) for slot in range(4)]
    assert shares == [(2, 500_000, 3), (2, 500_000, 2), (1, 500_000, 2), (1, 500_000, 2)]
    # However many there may be, one waits for the next
    assert [policy(slots=slots, rate=1_000_000).slot_limits(0)[1] for slots in (1, 2, 4)] == [1, 2, 4]
    # None has no burst at all, which would be no delivery ever
    assert policy(slots=4, rate=1000, burst=1).slot_limits(3) == (0, 4000, 1)


@pytest.mark.parametrize(("rate", "burst"), [(None, 1), ("1/s", 1), ("4/s", 1), ("16/s", 2), ("100/s", 10)])
def test_a_burst_that_nobody_named_is_a_tenth_of_a_second(rate: str | None, burst: int) -> None:
    assert policy(rate=rate).burst == burst


def test_a_rate_is_one_a_day_to_a_million_a_second() -> None:
    assert policy(rate="1/24h").rate == Fraction(1, 86_400)
    assert policy(rate=1_000_000).rate == 1_000_000
    for rate in ("1/24h1s", 1_000_001):
        with pytest.raises(InvalidArgument, match="out of range"):
            policy(rate=rate)


@pytest.mark.parametrize("stored", [1, [1], "text", None])
def test_what_is_stored_and_no_map_is_no_policy(stored: Any) -> None:
    with pytest.raises(DecodeError) as refused:
        diff_policies(policy().pack_stored(), msgpack.packb(stored))
    assert refused.value.why == "expected a policy, got another type"


@pytest.mark.parametrize(
    ("name", "value"), [("edge", "middle"), ("edge", None), ("priority", 2), ("rate", "1/"), ("rate", "-1")]
)
def test_what_is_stored_and_none_of_its_values_is_no_policy(name: str, value: Any) -> None:
    facts = msgpack.unpackb(policy(rate=5).pack_stored())
    with pytest.raises(DecodeError, match=r"expected a policy: .* is not one of its values"):
        from_stored(msgpack.packb(facts | {name: value}), policy())


@pytest.mark.parametrize(
    ("name", "said", "other"),
    [("lease", "5s", "6s"), ("max_attempts", 5, 6), ("dead_retention", "1h", "2h"), ("max_dead_letters", 7, 8)],
)
def test_what_is_said_once_of_a_topic_counts_wherever_that_was(name: str, said: Any, other: Any) -> None:
    one, silent = policy(**{name: said}), policy()
    for found in (merge_declarations(silent, one), merge_declarations(one, silent), merge_declarations(one, one)):
        assert getattr(found, name) == getattr(one, name) != getattr(silent, name)
    # And of a backoff, where one is named
    patient = policy(backoff="7s")
    for found in (merge_declarations(silent, patient), merge_declarations(patient, silent)):
        assert found.backoff.ms(1) == 7_000
    with pytest.raises(InvalidArgument, match=f"^{name}=.*this program declared {getattr(one, name)} before"):
        merge_declarations(one, policy(**{name: other}))


def test_a_newer_policy_keeps_the_slots_and_what_is_not_stored() -> None:
    mine = policy(window="1s", slots=4, lease="9s")
    found = find_newer(policy(window="2s", slots=8, revision=1).pack_stored(), mine)
    assert found == replace(mine, window=2_000, revision=1)


@pytest.mark.parametrize("stored", [{"revision": 1}, {"revision": 0}, {"revision": 2, "merge": "append"}])
def test_a_policy_is_not_newer(stored: Any) -> None:
    assert find_newer(policy(window="2s", **stored).pack_stored(), policy(window="1s", revision=1)) is None
