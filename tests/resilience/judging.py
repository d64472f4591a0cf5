"""What is asked at the end of every fault test: is the store sound, and is what was run on it?"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

from idemgate import Gate, StoreUnavailable
from idemgate.store.nodes import servers
from idemgate.testing import Clock, Event, History, audit

__all__ = ["KillCase", "Namespaces", "check_sound", "history_of", "over"]


class Namespaces:
    """Those that a test has made. Each is audited at the test's end, on every server that is up then, and on every
    `Server` before it is taken down; `damages` are the kinds of faults that are to be found."""

    def __init__(self, damages: set[str]) -> None:
        self.damages = damages
        self.gates: dict[str, Gate] = {}
        self.audited: set[str] = set()

    def note(self, gate: Gate) -> None:
        """One for each namespace and way to it: its text says both."""
        self.gates[repr(gate)] = gate

    def audit(self, gate: Gate) -> None:
        report = audit(gate)
        assert {*report.by_kind} <= self.damages, f"{gate}: {report}"
        self.audited.add(gate.namespace)

    def leave(self, url: str) -> None:
        """That server is about to end. Whichever namespaces came to it, with a file or as a replica, are sound."""
        for name, gate in {gate.namespace: gate for gate in self.gates.values()}.items():
            self.audit(Gate(url, namespace=name, clock=gate.context.clock))

    def end(self) -> None:
        for gate in [*self.gates.values()]:
            if _answers(gate):
                self.audit(gate)
        for gate in self.missed().values():  # a busy server may have been slow to answer
            with suppress(StoreUnavailable):
                self.audit(gate)

    def missed(self) -> dict[str, Gate]:
        return {gate.namespace: gate for gate in self.gates.values() if gate.namespace not in self.audited}


def _answers(gate: Gate) -> bool:
    """Asked once: an audit would go on asking for seconds."""
    with suppress(StoreUnavailable), servers(gate.context.endpoint) as found:
        return all(one.command("PING") for one in found)
    return False


def history_of(raw: Any, namespace: str) -> History:
    """What the processes of a scene ran, each of which has ended since: none of its attempts is live any more."""
    return History.of(raw.lrange(f"{namespace}:history", 0, -1))


def over(raw: Any, namespace: str) -> None:
    """A process of a scene has ended, by whatever means: what it still had in hand is gone."""
    for owner in {event.owner for event in history_of(raw, namespace).events if event.what == "start"}:
        raw.rpush(f"{namespace}:history", Event("gone", owner=owner).to_json())


def check_sound(gate: Gate, raw: Any) -> None:
    """The store is as it must be, and so is what was run on it."""
    report = audit(gate, history=history_of(raw, gate.namespace).findings())
    assert report.sound, str(report)


class KillCase:
    """A namespace on a test's clock, and the processes of a scene on it, of which some are killed."""

    numbers = itertools.count()

    def __init__(self, zygote: Any, url: str, raw: Any, namespace: str, **order: Any) -> None:
        self.zygote, self.raw = zygote, raw
        self.namespace = f"{namespace}-{next(self.numbers)}"
        self.clock = Clock()
        self.gate = Gate(url, namespace=self.namespace, clock=self.clock)
        self.order = {"url": url, "namespace": self.namespace, **order}

    def run_process(self, flavour: str, does: tuple[str, ...], **order: Any) -> dict[str, Any]:
        """Run a process to its end, on the clock as it is now."""
        now = self.clock.microseconds() / 1_000_000
        ended: dict[str, Any] = self.zygote(**self.order, now=now, flavour=flavour, **{"with": does, **order})
        over(self.raw, self.namespace)
        return ended

    def close(self) -> None:
        check_sound(self.gate, self.raw)
        self.gate.close()
        for key in self.raw.scan_iter(f"*{self.namespace}*", count=1000):
            self.raw.delete(key)
