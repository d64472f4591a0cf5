"""The heartbeat thread: what happens to the other leases when one renewal fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import pytest

from idemgate import Gate
from idemgate.core.calls import Batch, call
from idemgate.store.heartbeat import HeartbeatThread
from tests.renewals import FunctionRenewal
from tests.waiting import wait_until


@pytest.fixture
def live(url: str, namespace: str) -> Iterator[Gate]:
    with Gate(url, namespace=namespace) as made:
        yield made


def frequent(lease: float, *functions: Any) -> FunctionRenewal:
    """A renewal every 5 ms of a lease that no stall of the machine ends."""
    made = FunctionRenewal(lease, *functions)
    made.interval = 0.005
    made.due = made.last
    return made


def ping(calls: list[float]) -> Callable[[object], Sequence[Batch[None]]]:
    """Renew by a call that the server answers; note each answer."""
    request = call("topics/registry", (b"ig2:{none}:topics",), (b"",), lambda reply: reply)
    return lambda _: [Batch([request], lambda _: calls.append(monotonic()))]


class Bug(Exception):
    pass


def fail(*_: object) -> Any:
    raise Bug("of one lease")


FAILING: dict[str, Callable[[], FunctionRenewal]] = {
    "cannot be built": lambda: frequent(60, fail, lambda: None),
    "cannot be sent": lambda: frequent(
        60, lambda _: [Batch([call("topics/registry", (b"k",), (object(),), lambda _: _)], fail)], lambda: None
    ),
    "its answer cannot be read": lambda: frequent(60, lambda _: [Batch([], fail)], lambda: None),
    "its loss cannot be handled": lambda: frequent(0, fail, fail),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_renewal_that_raises_is_tried_again_and_the_others_go_on(live: Gate, kind: str, caplog: Any) -> None:
    # Given two leases that are renewed, and between them one whose renewal raises
    before, after = list[float](), list[float]()
    renewals = [frequent(60, ping(before), fail), FAILING[kind](), frequent(60, ping(after), fail)]
    for renewal in renewals:
        live.context.heartbeat.add(renewal)
    # When it has failed many times
    wait_until(lambda: live.counters["lease.renewal_error"] >= 4)
    seen = len(before), len(after)
    # Then the others are renewed as before, and never failed
    wait_until(lambda: len(before) > seen[0] + 2 and len(after) > seen[1] + 2)
    assert (renewals[0].failures, renewals[2].failures) == (0, 0)
    # And its failures are counted and logged
    assert renewals[1].failures >= 2
    assert live.counters["lease.renewal_failed"] >= 2
    assert any(record.name == "idemgate.lease" and record.levelno == logging.ERROR for record in caplog.records)


def test_a_thread_that_cannot_log_goes_on(live: Gate) -> None:
    # Given a filter of the user's logging that raises
    renewed, log = list[float](), logging.getLogger("idemgate.lease")
    log.addFilter(fail)
    try:
        kept = frequent(60, ping(renewed), fail)
        broken = frequent(60, fail, fail)
        live.context.heartbeat.add(broken)
        wait_until(lambda: live.counters["lease.renewal_error"] >= 2)
        live.context.heartbeat.add(kept)
        wait_until(lambda: len(renewed) > 2)
    finally:
        log.removeFilter(fail)
    assert any(thread.name == "idemgate-heartbeat" for thread in threading.enumerate())


def test_a_renewal_that_ends_when_it_is_due_does_not_end_the_thread(
    live: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the only lease of a gate, which ends between the moment when it is due and its renewal
    thread, ended = live.context.heartbeat, threading.Event()
    only = frequent(60, ping([]), fail)
    collect = HeartbeatThread._collect_due

    def collect_late(self: HeartbeatThread) -> Any:
        self.remove(only)
        ended.set()
        return collect(self)

    monkeypatch.setattr(HeartbeatThread, "_collect_due", collect_late)
    thread.add(only)
    assert ended.wait(20)
    monkeypatch.undo()
    # Then the same thread renews the next lease
    renewed, started = list[float](), thread._thread
    following = frequent(60, ping(renewed), fail)
    thread.add(following)
    wait_until(lambda: len(renewed) > 1)
    assert thread._thread is started
    assert live.counters["lease.renewal_error"] == 0


def test_closing_tells_every_owner_although_one_raises(live: Gate) -> None:
    told = list[int]()
    renewals = [FunctionRenewal(60, ping([]), fail) for _ in range(3)]
    renewals += [FunctionRenewal(60, ping([]), lambda: told.append(1)) for _ in range(3)]
    for renewal in renewals:
        live.context.heartbeat.add(renewal)
    live.context.heartbeat.close()
    assert len(told) == 3
    assert live.counters["lease.renewal_error"] == 3
