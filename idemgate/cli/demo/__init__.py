"""`idemgate demo` shows the main job on one screen and checks its own promises.

`actors.py` is what a user would write: subscribers and a worker. Each is a process. This file starts them and publishes
the events of `events.py` and kills two of the processes. `records.py` judges what each process reported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from idemgate.cli.arguments import count, duration, factor
from idemgate.cli.demo.actors import DemoOrder, topic_of
from idemgate.cli.demo.events import DemoPlan, made_up, plan_of, read
from idemgate.cli.demo.records import Records, Reports, check_promises
from idemgate.cli.signals import Interrupted, Signals, watching
from idemgate.core import keys
from idemgate.errors import InvalidArgument, StoreError
from idemgate.gate import Gate
from idemgate.store.embedded.server import directory_of, start

__all__ = ["add_to", "play"]

PATIENCE = 60.0
"""Seconds that the processes may take to start. Also the seconds without a report after which the demo gives up."""
END = 17.0
"""Seconds that a process may take to end."""
MOST_BEHIND = 500
"""Publications that the slowest subscriber may be behind: the server cuts off one that reads too slowly."""
PYTHON = [sys.executable, *([] if Path(__file__).parents[3] == Path.cwd() else ["-P"])]
"""A redis.py in the user's current directory is not meant; a checkout that is the current directory is."""

DESCRIPTION = """\
Shows the main job on one screen, and checks its own promises. Several
subscribers receive the same events, some of them twice. A guard (once) lets the
first copy of each through. It triggers a topic, and a worker gets one delivery
a path and window. In the middle a subscriber and the worker are killed, and new
ones start: nothing is lost. If a promise is broken, the exit code is 1.

The events of a file are published with its pauses, cut to 1 minute. --speed 20
is 20 times as fast; so is the window. --speed max leaves out the pauses, and
does not change the window. The publisher waits for the slowest subscriber."""

Say = Callable[[str], None]


class Stopped(Exception):
    """The run cannot go on: a process ended before its time or nothing happens any more."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    source = "JSON lines of {id, ts, path, change}, gzipped or not (default: made up)"
    add("--input", metavar="FILE", type=Path, help=source)
    add("--speed", metavar="FACTOR", type=factor, help="times as fast, or max (default: it takes 25 s at most)")
    window = "window of the topic, in the file's time (default: 1s; of a file 1h)"
    add("--window", metavar="TIME", type=duration, help=window)
    add("--events", metavar="N", type=count, help="only the first N events (default: all; 2,000 made up)")
    add("--subscribers", metavar="N", type=count, default=4, help="processes that receive every event (default: 4)")
    killing = "kill a subscriber and the worker in the middle (default: yes)"
    add("--kill", action=argparse.BooleanOptionalAction, default=True, help=killing)
    add("--url", help="use this server, such as redis://localhost:6379/0 (default: an embedded one)")
    add("--json", action="store_true", help="the final report as JSON on stdout; progress goes to stderr")
    parser.set_defaults(command=play)


def play(options: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    events = read(options.input, options.events) if options.input else made_up(options.events or 2000)
    plan, speed = plan_of(events, options.speed)
    window = options.window or (3600.0 if options.input else 1.0)
    window = max(0.001, round(window if math.isinf(speed) else window / speed, 3))
    records = Records(options.subscribers, window)
    out = sys.stderr if options.json else sys.stdout
    try:
        with watching() as signals, _screen(records, len(plan), out) as say, _server(options.url, say) as url:
            say(f"{len(events):,} events, {options.subscribers} subscribers, a window of {window:g} s")
            say(f"It takes {plan[-1][0]:.3g} s, or as long as the subscribers need")
            order = DemoOrder(url, f"demo-{secrets.token_hex(6)}", window)
            _Stage(order, records, signals, say).run(plan, options.kill)
    except Interrupted as interrupted:
        print(f"Interrupted after {time.monotonic() - records.began:.1f} s, nothing judged", file=out)
        return interrupted.code
    promises = check_promises(records)
    kept = not any(promises.values())
    if options.json:
        numbers: dict[str, Any] = {name: value for name, value, _ in records.numbers()}
        print(json.dumps(numbers | {"events": len(events), "kept": kept, "promises": promises}, indent=2))
    else:
        _print_report(records, promises)
    return 0 if kept else 1


@contextlib.contextmanager
def _server(url: str | None, say: Say) -> Generator[str]:
    if url and "+cluster://" in url:
        fix = "Name one of its nodes as redis://, if that may be written to, or another server"
        raise InvalidArgument("url", url, "the demo looks at one server's clock, a cluster has many", fix)
    if url and not url.startswith("embedded:"):
        yield url
        return
    with start(directory_of(url) if url else None) as embedded:
        binary = embedded.binary
        say(f"Server: {binary.path} {binary.version} (from {binary.source})")
        yield embedded.url


# -- the screen ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _screen(records: Records, total: int, out: TextIO) -> Generator[Say]:
    """Yield a function that prints a line. On a terminal with rich the numbers are redrawn below the lines."""
    if not out.isatty() or find_spec("rich") is None:
        yield functools.partial(print, file=out, flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    def render() -> str:
        done = len(records.published) / total
        progress = f"  {'progress':<20}{done:>9.0%}  {'━' * round(40 * done)}"
        return "\n".join(["", progress, *_number_lines(records)])

    console = Console(file=out, highlight=False)
    with Live(console=console, get_renderable=render, transient=True, redirect_stderr=False):
        yield functools.partial(console.print, markup=False)


def _number_lines(records: Records) -> list[str]:
    return [f"  {name.replace('_', ' '):<20}{value:>9,}  {meaning}" for name, value, meaning in records.numbers()]


def _print_report(records: Records, promises: dict[str, list[str]]) -> None:
    print("", *_number_lines(records), "", sep="\n")
    if len(records.workers) > 1:
        print("What the killed processes had not finished was done again, 2 s later.")
        print("What they had done and could not report is missing in the numbers.\n")
    for promise, broken in promises.items():
        print(f"  {'BROKEN' if broken else 'kept  '}  {promise}")
        for text in broken:
            print(f"          {text}")


# -- the processes ---------------------------------------------------------------------------------------------------


class _Child:
    """A process of the demo. It ends with its parent because that holds its stdin open."""

    def __init__(self, name: str, reports: Reports, order: DemoOrder, say: Say) -> None:
        self.name, self.reports, self.say = name, reports, say
        self.process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [*PYTHON, "-c", "from idemgate.cli.demo import actors; actors.main()", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # Ctrl-C is for the parent alone; it ends the others in their order
        )
        self.reader = threading.Thread(target=self._read, name="demo-reader", daemon=True)
        self.reader.start()
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)  # arguments and environments are visible

    def _read(self) -> None:
        """Take the lines that are JSON lists as reports and show all others."""
        for line in self.process.stdout or ():
            if line.startswith("[") and line.endswith("]\n"):  # else it was killed while it wrote
                self.reports.take(*json.loads(line))
            elif not line.startswith("["):
                self.say(f"{self.name}: {line.rstrip()}")

    def end(self, seconds: float) -> int:
        """Wait for the end and return the exit code. Kill the process if it is late. Read what it reported before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.reader.join()
        with self.process:
            return self.process.wait()


class _Stage:
    """One run of the demo with its processes."""

    def __init__(self, order: DemoOrder, records: Records, signals: Signals, say: Say) -> None:
        self.order, self.records, self.signals, self.say = order, records, signals, say
        self.gate = Gate(order.url, namespace=order.name)
        self.topic = topic_of(self.gate, order)
        self.children: dict[str, _Child] = {}

    def run(self, plan: DemoPlan, kill: bool) -> None:
        """Run the demo. Even after an error it ends all processes and deletes the topic. What it leaves expires."""
        with contextlib.closing(self.gate):
            try:
                self.topic.open()
                self._start_all()
                self._publish(plan, kill)
                self.say("Waiting for the last windows")
                self._wait_until(self._is_done, self.order.window + PATIENCE)
            except Stopped as reason:
                self.records.faults.append(str(reason))
            finally:
                self._end_all()
                with contextlib.suppress(StoreError):
                    stats = self.topic.stats()
                    self.records.topic = {"pending": stats.pending, "in_flight": stats.in_flight, "dead": stats.dead}
                    self.records.topic |= {name: stats[name] for name in ("accepted", "acked_triggers")}
                    self.topic.delete(discard=True)
                    for left in (keys.scopes(self.order.name), keys.process_names(self.order.name)):
                        self._command("DEL", left)  # apart: on a cluster they are in two slots

    def _start_all(self) -> None:
        self.say(f"Starting {len(self.records.subscribers)} subscribers and a worker")
        for number, reports in enumerate(self.records.subscribers, 1):
            self._start(f"subscriber {number}", reports)
        self._start("worker", self.records.workers[0])
        self._wait_until(self._is_subscribed, PATIENCE)

    def _start(self, name: str, reports: Reports) -> None:
        self.children[name] = _Child(name, reports, self.order, self.say)

    def _publish(self, plan: DemoPlan, kill: bool) -> None:
        self.say(f"Publishing, with duplicates, {len(plan):,} times")
        began = time.monotonic()
        for number, (at, event) in enumerate(plan):
            if kill and number == len(plan) * 3 // 10 and len(self.records.subscribers) > 1:
                self._replace("subscriber 1", self.records.subscribers, "The others take over its keys")
            if kill and number == len(plan) * 6 // 10:
                self._replace("worker", self.records.workers, "Its deliveries return after 2 s")
            self._check(0)
            while time.monotonic() < began + at:
                self._check()
            self._wait_until(lambda: max(self.records.open_copies) < MOST_BEHIND, PATIENCE)
            self.records.published.append(event)  # before it is: a report may come before the answer
            self._command("PUBLISH", self.order.name, json.dumps(event._asdict()))

    def _replace(self, name: str, reports: list[Reports], result: str) -> None:
        """Kill a process in the middle of its work and start another."""
        victim = self.children.pop(name)
        victim.reports.complete = False
        victim.end(0)
        self.say(f"Killed {name} (SIGKILL). {result}; a new one starts.")
        reports.append(Reports(complete=False))
        self._start(f"new {name}", reports[-1])

    def _wait_until(self, reached: Callable[[], bool], patience: float) -> None:
        """Wait for a condition. Raise Stopped once no process has reported anything for `patience` seconds."""
        reports, since = self.records.size, time.monotonic()
        while not reached():
            self._check()
            if self.records.size > reports:
                reports, since = self.records.size, time.monotonic()
            elif time.monotonic() > since + patience:
                raise Stopped(f"nothing happened for {patience:.0f} s, so no more was waited for")

    def _is_subscribed(self) -> bool:
        """Publish a message without an event and return whether each subscriber has reported one.

        NUMSUB of Valkey 9.1 counts 8, 15 and 16 subscribers as some great number.
        """
        self._check(0.1)
        self._command("PUBLISH", self.order.name, "null")
        return all(one.ready for one in self.records.subscribers)

    def _is_done(self) -> bool:
        stats = self.topic.stats()
        return not any((*self.records.open_copies, stats.pending, stats.in_flight))

    def _check(self, seconds: float = 0.01) -> None:
        """Wait a moment. Raise Stopped if a process ended and Interrupted after a signal."""
        time.sleep(seconds)
        self.signals.check()
        for name, child in self.children.items():
            if (code := child.process.poll()) is not None:
                raise Stopped(f"{name} ended with {code}")

    def _end_all(self) -> None:
        for child in self.children.values():
            child.process.terminate()
        for name, child in self.children.items():
            if (code := child.end(END)) not in (0, -signal.SIGTERM):  # SIGTERM: it was still starting
                self.records.faults.append(f"{name} ended with {code}")

    def _command(self, *command: str | bytes) -> Any:
        return self.gate.context.link.command(*command)
