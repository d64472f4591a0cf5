"""What judges a soak finds what a soak is there to find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.resilience.verdict import Verdict

LEASE = 1_500_000
"""Microseconds, as tokens are."""


def start(pid: int, token: int, name: str = "k", group: str = "", attempt: int = 1) -> list[Any]:
    return ["start", pid, name, group, token, attempt, [name]]


def judged(*events: list[Any], slack: int = 0) -> Verdict:
    return Verdict(events, LEASE, slack)


def beats(pid: int, name: str, token: int | None, *moments: int) -> list[list[Any]]:
    """Heartbeats that got through at these moments."""
    return [["renewed", pid, name, token, moment + LEASE] for moment in moments]


@pytest.mark.parametrize(("name", "token"), [("k", None), ("t/k", 1_000)], ids=["guarded", "delivered"])
def test_an_owner_beside_one_whose_heartbeats_get_through_is_found(name: str, token: int | None) -> None:
    # Given a run that has lived for many leases, by its heartbeats
    alive = [start(1, 1_000, name), *beats(1, name, token, *range(0, 10 * LEASE, LEASE // 6))]
    # When another begins beside it, long after its first lease would have ended
    verdict = judged(*alive, start(2, 10 * LEASE, name, attempt=2))
    # Then that is wrong
    assert len(verdict.wrong) == 1
    assert "began while" in verdict.wrong[0]


def test_two_of_a_group_are_found_as_two_of_a_key_are() -> None:
    alive = [start(1, 1_000, "t/a", "g"), *beats(1, "t/a", 1_000, LEASE // 2, LEASE)]
    assert judged(*alive, start(2, LEASE + 5_000, "t/b", "g")).wrong
    assert not judged(*alive, start(2, LEASE + 5_000, "t/b", "other")).wrong
    assert not judged(*alive, ["end", "t/a", 1_000], start(2, LEASE + 5_000, "t/b", "g")).wrong


def test_a_heartbeat_that_gets_through_when_another_has_begun_is_found() -> None:
    # Given a run whose lease ended, and another beside it
    lapsed = [start(1, 1_000), start(2, LEASE + 1_000, attempt=2)]
    assert not judged(*lapsed).wrong
    # When the store lets the first go on nevertheless
    assert judged(*lapsed, *beats(1, "k", None, LEASE + 2_000)).wrong


def test_who_is_silent_for_a_lease_is_excused_and_counted() -> None:
    """As a process is that was stopped, or could not reach the server."""
    verdict = judged(start(1, 1_000), *beats(1, "k", None, 500_000), start(2, 500_000 + LEASE, attempt=2))
    assert verdict.wrong == []
    assert verdict.overtaken == {("k", 1_000)}


def test_death_ends_no_lease() -> None:
    # Given a run of a process that was killed
    dead = [start(1, 1_000), ["killed", 1]]
    # Then no run may begin before its lease has ended, and a run that begins afterwards takes over nothing
    assert judged(*dead, start(2, LEASE, attempt=2)).wrong
    verdict = judged(*dead, start(2, LEASE + 1_000, attempt=2))
    assert (verdict.wrong, verdict.overtaken) == ([], set())


def test_as_much_is_forgiven_as_the_clock_may_have_been_set_back() -> None:
    early = start(1, 1_000), start(2, LEASE - 99_000, attempt=2)
    assert judged(*early).wrong
    assert judged(*early, slack=99_999).wrong
    assert not judged(*early, slack=100_000).wrong


def test_a_heartbeat_of_what_is_taken_and_not_begun_counts_and_one_after_the_end_does_not() -> None:
    prefetched = beats(1, "t/a", 1_000, LEASE)
    assert judged(*prefetched, start(1, 1_000, "t/a", "g"), start(2, LEASE + 2_000, "t/b", "g")).wrong
    ended = [start(1, 1_000, "t/a", "g"), ["end", "t/a", 1_000], *beats(1, "t/a", 1_000, LEASE)]
    assert not judged(*ended, start(2, LEASE + 2_000, "t/b", "g")).wrong


def test_a_heartbeat_before_the_start_of_a_run_is_not_of_the_former_run_of_its_process() -> None:
    # Given a run whose lease ended, and a claim of the same process that is renewed before its run starts
    lapsed, renewed = [start(1, 1_000)], beats(1, "k", None, LEASE + 5_000)
    # Then the later run began beside none
    assert not judged(*lapsed, *renewed, start(1, LEASE + 2_000, attempt=2)).wrong
    # And heartbeats before its token are of the former run
    assert judged(*lapsed, *beats(1, "k", None, LEASE - 5_000), start(1, LEASE + 2_000, attempt=2)).wrong
