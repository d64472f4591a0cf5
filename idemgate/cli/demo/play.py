"""The demo from its start to its end: server, processes, publishing, judgement."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from idemgate.cli.demo import screen as screens
from idemgate.cli.demo.actors import topic_of
from idemgate.cli.demo.children import Child, end
from idemgate.cli.demo.events import Event, Plan, made_up, plan_of, read
from idemgate.cli.demo.order import Order
from idemgate.cli.demo.promises import Promise, judge
from idemgate.cli.demo.publishing import drain, publish, wait_until
from idemgate.cli.demo.records import Records
from idemgate.cli.signals import Interrupted, Signals, watching
from idemgate.core import keys
from idemgate.errors import IdemgateError, StoreError
from idemgate.gate import Gate
from idemgate.link.embedded import start
from idemgate.topic.faces import Topic

__all__ = ["play"]

START = 20.0
"""Seconds the processes may take to start and subscribe."""
STALL = 10.0
"""Seconds without anything happening, beyond the window, after which no more is waited for."""


class Fallen(IdemgateError):
    """One of the processes ended before its time: nothing can be promised any more."""


def play(options: argparse.Namespace, doctor: Callable[[Records], None] = lambda _: None) -> int:
    """Plays the demo; its exit code. `doctor` may falsify the records before they are judged: to test the judgement."""
    events = read(options.input, options.events) if options.input else made_up(options.events or 2000, options.seed)
    plan = plan_of(events, options.speed or (None if options.input else 1.0), options.max_gap, options.seed)
    out = sys.stderr if options.json else sys.stdout
    records = Records(options.subscribers)
    began = time.monotonic()
    try:
        with watching() as signals, screens.chosen(out) as screen, _server(options.url, screen) as url:
            order = Order(url, f"demo-{secrets.token_hex(6)}", f"demo-{secrets.token_hex(6)}", _window(options, plan))
            screen.say(_told(plan, events, order, options))
            _Stage(order, plan, records, screen, signals).run()
    except Interrupted as interrupted:
        numbers = records.numbers()
        print(
            f"Interrupted after {time.monotonic() - began:.1f} s: published {numbers['published']:,} of "
            f"{len(plan.publications):,}, handled {numbers['handled']:,}, delivered {numbers['deliveries']:,}. "
            f"Everything is ended; the promises were not judged.",
            file=out,
        )
        return interrupted.code
    doctor(records)
    return _report(records, time.monotonic() - began, plan, options.json)


class _Stage:
    """One performance: who takes part, and what is told of it."""

    def __init__(self, order: Order, plan: Plan, records: Records, screen: screens.Screen, signals: Signals) -> None:
        self.order, self.plan, self.records, self.screen, self.signals = order, plan, records, screen, signals
        self.children: list[Child] = []

    def run(self) -> None:
        with contextlib.closing(Gate(self.order.url, namespace=self.order.namespace)) as gate:
            try:
                self._start(gate)
                self._perform(gate)
            except Fallen as fallen:
                if not self.records.published:
                    raise
                self.records.faults.append(str(fallen))
            finally:
                self.records.faults += end(self.children)
                _tidy(gate, topic_of(gate, self.order))

    def _start(self, gate: Gate) -> None:
        topic_of(gate, self.order).open()
        for number in range(self.records.subscribers):
            self._child("subscriber", f"subscriber {number + 1}", number)
        self._child("worker", "worker", 0)
        wanted = self.records.subscribers

        def all_hear() -> bool:
            return int(gate.link.command("PUBSUB", "NUMSUB", self.order.channel)[1]) >= wanted

        if not wait_until(all_hear, START, lambda: self._look("starting", 0)):
            raise StoreError(f"the {wanted} subscribers did not all subscribe within {START:g} s")

    def _child(self, role: str, name: str, number: int) -> None:
        def heard(facts: Mapping[str, Any]) -> None:
            self.records.take(number, facts)

        self.children.append(Child(role, name, self.order, heard, self.screen.say))

    def _perform(self, gate: Gate) -> None:
        total = len(self.plan.publications)
        behind = publish(gate, self.order.channel, self.plan, self.records, lambda done: self._look("publishing", done))
        if behind > 1:
            self.screen.say(f"Published {screens.took(behind)} behind schedule: no faster than the subscribers follow.")
        if not drain(self.records, self.order.window + STALL, lambda: self._look("last windows", total)):
            self.records.faults.append(
                f"nothing happened for {self.order.window + STALL:.0f} s, so no more was waited for"
            )
        stats = topic_of(gate, self.order).stats()
        self.records.store = dict(stats.counters) | {
            "pending": stats.pending, "in_flight": stats.in_flight, "dead": stats.dead,
            "accepted": stats["accepted"], "acked_triggers": stats["acked_triggers"],
        }  # fmt: skip

    def _look(self, phase: str, done: int) -> None:
        self.signals.check()
        self.screen.tick(phase, done, len(self.plan.publications), self.records)
        for child in self.children:
            if child.ended:
                raise Fallen(child.ended)


@contextlib.contextmanager
def _server(url: str | None, screen: screens.Screen) -> Generator[str]:
    if url is not None:
        yield url
        return
    with start() as embedded:
        screen.say(f"Server: {embedded.binary.path} {embedded.binary.version}, embedded, on a socket of its own")
        yield embedded.url


def _window(options: argparse.Namespace, plan: Plan) -> float:
    given = options.window or (3600.0 if options.input else 1.0)
    return max(0.001, round(given if math.isinf(plan.speed) else given / plan.speed, 3))


def _told(plan: Plan, events: list[Event], order: Order, options: argparse.Namespace) -> str:
    paths = len({event.path for event in events})
    facts = f"{plan.events:,} events of {paths:,} paths, {options.subscribers} subscribers"
    lines = [f"{facts}, a window of {screens.took(order.window)}"]
    if options.input:
        first, last = (datetime.fromtimestamp(events[place].ts, UTC) for place in (0, -1))
        cut = f"pauses cut to {screens.took(options.max_gap)} leave {screens.took(plan.stream)}"
        lines.append(f"{first:%Y-%m-%d} to {last:%Y-%m-%d}; {cut}")
    if math.isinf(plan.speed):
        lines.append("as fast as the subscribers follow")
    else:
        speed = f"{plan.speed:,.0f}" if plan.speed >= 100 else f"{plan.speed:.3g}"
        lines.append(
            f"{screens.took(plan.duration)}, at {speed} times the speed"
            if speed != "1"
            else f"{screens.took(plan.duration)}"
        )
    return "; ".join(lines)


def _tidy(gate: Gate, topic: Topic) -> None:
    """Nothing of the topic stays on a server that is not ours; the guard's records fade by themselves."""
    with contextlib.suppress(StoreError):
        gate.link.command("UNLINK", keys.topics(gate.namespace))
        for slot in range(topic.policy.slots):
            gate.link.command("UNLINK", *keys.slot(gate.namespace, topic.name, slot))


def _report(records: Records, elapsed: float, plan: Plan, as_json: bool) -> int:
    numbers = records.numbers() | {"elapsed_s": round(elapsed, 2)}
    promises = judge(records)
    kept = all(promise.kept for promise in promises)
    if as_json:
        told = [{"promise": one.text, "kept": one.kept, "broken": one.broken} for one in promises]
        facts = {"events": plan.events, "subscribers": records.subscribers, "kept": kept, "promises": told}
        print(json.dumps(numbers | facts, indent=2))
    else:
        _print(numbers, promises, sys.stdout)
    return 0 if kept else 1


def _print(numbers: Mapping[str, Any], promises: list[Promise], out: TextIO) -> None:
    print(file=out)
    for label, text in screens.rows(numbers):
        print(f"  {label:<20}{text:>12}", file=out)
    print(file=out)
    for promise in promises:
        print(f"  {'kept  ' if promise.kept else 'BROKEN'}  {promise.text}", file=out)
        for words in promise.broken:
            print(f"          {words}", file=out)
