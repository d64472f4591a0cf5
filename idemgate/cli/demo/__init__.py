"""`idemgate demo` shows the main job on one screen, and checks its own promises.

`actors.py` is what a user would write: subscribers and a worker, each a process. This file starts them, publishes the
events of `events.py`, kills two of the processes, and draws the screen. `records.py` judges what each process reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from idemgate.cli.arguments import HelpFormatter, count, duration, factor
from idemgate.cli.demo.actors import DemoOrder, topic_of
from idemgate.cli.demo.events import Plan, made_up, plan_of, read
from idemgate.cli.demo.records import Records, Reports, judge
from idemgate.cli.signals import Interrupted, Signals, watching
from idemgate.errors import InvalidArgument, StoreError
from idemgate.gate import Gate
from idemgate.store.embedded.server import directory_of, start

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

__all__ = ["add_to", "play"]

PATIENCE = 60.0
"""Seconds the processes may take to start, and seconds without progress after which no more is waited for."""
END = 17.0
"""Seconds the processes may take to end."""
MOST_BEHIND = 500
"""Publications that the slowest subscriber may be behind. Pub/Sub does not slow down the publisher: the server cuts off
a subscriber that reads too slowly, and it misses the rest."""
PYTHON = [sys.executable, *([] if Path(__file__).parents[3] == Path.cwd() else ["-P"])]
"""A redis.py in the user's current directory is not meant; a checkout that is the current directory is."""

DESCRIPTION = """\
Shows the main job on one screen, and checks its own promises.

Several subscriber processes receive the same Pub/Sub channel, so every event
arrives once in each of them, and about 1 in 20 events is published twice. A
guard (once) lets the first copy through and drops the others. Each event that
got through triggers the merged topic of its path; a worker gets one delivery a
path and window. In the middle a subscriber and the worker are killed, and new
ones start: nothing is lost. If a promise is broken, the exit code is 1.

The events of a file are published with its pauses, cut to 1 minute and speeded
up: --speed 20 is 20 times as fast, and --speed max leaves out the pauses. The
publisher waits for the slowest subscriber, so it may take longer. --window is
speeded up, too, but not by --speed max."""


class Stopped(Exception):
    """The run cannot go on: a process ended before its time, or nothing happens any more."""


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    about = "see it work, and check its promises"
    parser = commands.add_parser("demo", help=about, description=DESCRIPTION, formatter_class=HelpFormatter)
    add = parser.add_argument
    source = "JSON lines of {id, ts, path, change}, gzipped or not (default: made up)"
    add("--input", metavar="FILE", type=Path, help=source)
    add("--speed", metavar="FACTOR", type=factor, help="times as fast, or max (default: a file takes 25 s)")
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
    plan, speed = plan_of(events, options.speed or (None if options.input else 1.0))
    given = options.window or (3600.0 if options.input else 1.0)
    window = max(0.001, round(given if math.isinf(speed) else given / speed, 3))
    records, out = Records(options.subscribers, window), sys.stderr if options.json else sys.stdout
    try:
        with watching() as signals, Screen(out, records) as screen, _server(options.url, screen) as url:
            screen.say(f"{len(events):,} events, {options.subscribers} subscribers, a window of {window:g} s")
            screen.say(f"It takes {plan[-1][0]:.3g} s, or as long as the subscribers need")
            order = DemoOrder(url, f"demo-{secrets.token_hex(6)}", f"demo-{secrets.token_hex(6)}", window)
            _Stage(order, plan, records, screen, signals).run(options.kill)
    except Interrupted as interrupted:
        counts = f"{len(records.published):,} published, {len(records.handler_runs):,} handled"
        print(f"Interrupted after {time.monotonic() - records.began:.1f} s: {counts}, nothing judged", file=out)
        return interrupted.code
    promises = judge(records)
    kept = not any(promises.values())
    if options.json:
        numbers: dict[str, Any] = {name: value for name, _, value, _ in records.numbers()}
        print(json.dumps(numbers | {"events": len(events), "kept": kept, "promises": promises}, indent=2))
    else:
        print(*_report(records, promises), sep="\n")
    return 0 if kept else 1


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
        screen.say(f"Server: {binary.path} {binary.version} (from {binary.source})")
        yield embedded.url


# -- the processes ---------------------------------------------------------------------------------------------------


class _Child:
    """A process of the demo. It ends with its parent, which holds its stdin open."""

    def __init__(self, name: str, reports: Reports, order: DemoOrder, say: Callable[[str], None]) -> None:
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
        """Take the reports, which are JSON lists, and show all other lines."""
        for line in self.process.stdout or ():
            if line.startswith("[") and line.endswith("]\n"):  # else it was killed while it wrote
                self.reports.take(*json.loads(line))
            elif not line.startswith("["):
                self.say(f"{self.name}: {line.rstrip()}")

    def end(self, seconds: float) -> int:
        """Wait for the end, kill the process if it is late, read what it reported before, and return its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.reader.join()
        with self.process:
            return self.process.wait()


class _Stage:
    """One run of the demo: its processes and its screen."""

    def __init__(self, order: DemoOrder, plan: Plan, records: Records, screen: Screen, signals: Signals) -> None:
        self.order, self.plan, self.records, self.screen, self.signals = order, plan, records, screen, signals
        self.gate = Gate(order.url, namespace=order.namespace)
        self.topic = topic_of(self.gate, order)
        self.children: list[_Child] = []
        self.kills: list[tuple[float, str, list[Reports], str]] = []

    def run(self, kill: bool) -> None:
        """Run the demo. All processes are ended and the topic is deleted, also after an error."""
        if kill:
            self.kills = [(0.6, "worker", self.records.workers, "Its deliveries return after 2 s")]
        if kill and len(self.records.subscribers) > 1:  # else no other one receives what the killed one misses
            self.kills += [(0.3, "subscriber 1", self.records.subscribers, "The others take over its keys")]
        with contextlib.closing(self.gate):
            try:
                self._start()
                self._publish()
                self._drain()
            except Stopped as reason:
                self.records.faults.append(str(reason))
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
            self.children.append(_Child(f"subscriber {number}", reports, self.order, self.screen.say))
        self.children.append(_Child("worker", self.records.workers[0], self.order, self.screen.say))
        deadline = time.monotonic() + PATIENCE
        while int(self._command("PUBSUB", "NUMSUB", self.order.channel)[1]) < len(self.records.subscribers):
            self._look(f"starting {len(self.children)} processes")
            if time.monotonic() > deadline:
                raise StoreError(f"the subscribers did not all subscribe within {PATIENCE:g} s")

    def _publish(self) -> None:
        began = time.monotonic()
        for at, event in self.plan:
            self._look("publishing", 0)
            while time.monotonic() < began + at or max(self.records.open_copies) >= MOST_BEHIND:
                self._look("publishing")
            self.records.published.append(event)  # before it is: a report may come before the answer
            self._command("PUBLISH", self.order.channel, json.dumps(event._asdict()))

    def _drain(self) -> None:
        """Wait until every copy is handled or dropped, and every delivery acknowledged."""
        patience, before, since = self.order.window + PATIENCE, [1], time.monotonic()
        while any(before):
            stats = self.topic.stats()
            left = [*self.records.open_copies, stats.pending, stats.in_flight]
            if left != before:
                before, since = left, time.monotonic()
            elif time.monotonic() > since + patience:
                raise Stopped(f"nothing happened for {patience:.0f} s, so no more was waited for")
            self._look("last windows")

    def _look(self, phase: str, seconds: float = 0.01) -> None:
        """Wait a moment, and see to the screen, to signals, and to the processes."""
        time.sleep(seconds)
        self.signals.check()
        self.screen.tick(phase, len(self.plan))
        if self.kills and len(self.records.published) >= self.kills[-1][0] * len(self.plan):
            self._kill(*self.kills.pop()[1:])
        for child in self.children:
            if (code := child.process.poll()) is not None:
                raise Stopped(f"{child.name} ended with {code}")

    def _kill(self, name: str, reports: list[Reports], result: str) -> None:
        victim = next(child for child in self.children if child.name == name)
        self.children.remove(victim)
        victim.reports.complete = False
        victim.end(0)
        self.screen.say(f"Killed {name} (SIGKILL). {result}; a new one starts.")
        reports.append(Reports(complete=False))
        self.children.append(_Child(f"new {name.rstrip(' 1')}", reports[-1], self.order, self.screen.say))

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


# -- the screen ------------------------------------------------------------------------------------------------------


class Screen:
    """The demo's progress: on a terminal with rich a bar and a table, else a line a second."""

    def __init__(self, out: TextIO, records: Records) -> None:
        self._out, self._records = out, records
        self._state, self._shown = ("starting", 0), records.began
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._out.isatty() and find_spec("rich") is None:
            self.say("pip install rich: a live table instead of these lines")
        elif self._out.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._out, highlight=False)
            if not console.is_dumb_terminal:  # whose cursor cannot be moved
                self._live = Live(console=console, get_renderable=self._render, transient=True, redirect_stderr=False)
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if self._live:
            self._live.console.print(text, markup=False)
        else:
            print(text, file=self._out, flush=True)

    def tick(self, phase: str, total: int) -> None:
        """Update the numbers; it may be called often."""
        self._state = phase, total
        if self._live is None and (now := time.monotonic()) >= self._shown + 1:
            self._shown = now
            if self._records.published:
                number = {name: value for name, _, value, _ in self._records.numbers()}
                phase += f": {number['published']:,}/{total:,}, handled {number['handled']:,}"
                phase += f", dropped {number['duplicates_dropped']:,}, delivered {number['deliveries']:,}"
            self.say(f"{now - self._records.began:4.0f} s  {phase}")

    def _render(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        phase, total = self._state
        done = len(self._records.published)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan")
        table.add_column(justify="right", min_width=10)
        table.add_column(style="dim")
        table.add_row(phase, f"{done:,}/{total:,}", ProgressBar(total or None, done, width=40))
        for _, label, value, meaning in self._records.numbers() if done else ():
            table.add_row(label, f"{value:,}", meaning)
        return table


def _report(records: Records, promises: dict[str, list[str]]) -> Iterator[str]:
    yield ""
    for _, label, value, meaning in records.numbers():
        yield f"  {label:<20}{value:>9,}  {meaning}"
    yield ""
    if not all(one.complete for one in records.subscribers):
        yield "The killed subscriber could not report the last events that it handled."
    if len(records.workers) > 1:
        yield "What the killed worker had not acknowledged was done again, 2 s later.\n"
    for promise, broken in promises.items():
        yield f"  {'BROKEN' if broken else 'kept  '}  {promise}"
        yield from (" " * 10 + text for text in broken)
