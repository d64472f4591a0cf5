"""`idemgate simulate EVENTS --window TIME ...`: what a topic would have made of recorded events."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

from idemgate.cli.arguments import count, duration
from idemgate.cli.demo.events import read_lines
from idemgate.cli.showing import show_answer
from idemgate.cli.window_chart import draw
from idemgate.core.calls import MAX_ENTRIES, Batch, Call
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.lua import Script
from idemgate.testing.clock import Clock
from idemgate.testing.server import temporary_server
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import Receipt, Trigger
from idemgate.topics.policy import policy_of
from idemgate.topics.topic import Topic

__all__ = ["add_to", "simulate"]

DESCRIPTION = """\
Shows what windows of a topic would have made of recorded events: how many deliveries they save, and how late these
are. It runs the scripts of idemgate on an embedded server, under a clock that it moves. It changes no other store.

  idemgate simulate events.ndjson --window 500ms,2s,10s --svg windows.svg

A line of the file is one event: {"key": "cat.png", "at": 1774612800.25, "payload": {"version": 7}}. The time is in
seconds, or ISO text (without a zone: UTC). The payload may be left out, and other fields are ignored. The file may be
gzipped. Lateness is the time in seconds from an event to its delivery. Bytes are those of the stored messages.
Handlers take no time here, so no event waits for one."""
SHAPE = 'Each line is like {"key": "cat.png", "at": 1774612800.25}, with "payload" if the policy merges payloads'
TOGETHER = 50_000
"""The number of bursts that begin together. It bounds the pending messages, and so the memory of the server."""
AT_ONCE = 20_000
"""The number of triggers that are sent together. It bounds the memory of this process."""
STEPS = 1000
"""The steps of the clock in a window."""


class TrafficEvent(NamedTuple):
    """An event: its time in ms, and the number of its line."""

    at: int
    key: str | int
    payload: object
    line: int


class PlannedTrigger(NamedTuple):
    """A trigger to send: its time in ms since the start of the simulation, the number of its burst, and its event."""

    at: int
    burst: int
    event: TrafficEvent


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("events", metavar="EVENTS", type=Path, help="a file of JSON lines, gzipped or not")
    timing = parser.add_mutually_exclusive_group(required=True)
    several = ", or several with commas"
    timing.add_argument("--window", metavar="TIME", type=_durations, help=f"window of the topic, such as 2s{several}")
    timing.add_argument(
        "--quiet", metavar="TIME", type=_durations, help=f"quiet time of the topic, such as 5s{several}"
    )
    add("--max-delay", metavar="TIME", type=duration, help="the longest delay of a quiet time (default: no limit)")
    add("--max-size", metavar="N", type=count, help="deliver as soon as so many events have merged (default: no limit)")
    add(
        "--merge",
        type=_merge,
        default="last",
        help='how payloads merge: last (default), append, ... or {"field": "sum"}',
    )
    add("--svg", metavar="FILE", type=Path, help="draw deliveries and lateness over the window")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=simulate)


def simulate(options: argparse.Namespace) -> int:
    """Run the events through a topic of each window, print a table, and return the exit code."""
    name = "window" if options.window else "quiet"
    policies = {span: _policy(name, span, options) for span in sorted({*(options.window or options.quiet)})}
    if options.svg is not None:
        _check_chart(options.svg, options.events)
    events = read_events(options.events)
    seconds = (events[-1].at - events[0].at) / 1000
    keys = len({event.key for event in events})
    print(f"{len(events):,} events of {keys:,} keys in {seconds:,.0f} s", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    clock = Clock()
    with temporary_server() as url, Gate(url, namespace="simulate", clock=clock, timeout="1m") as gate:
        for number, (span, policy) in enumerate(policies.items()):
            print(f"{name} of {span:g} s ...", file=sys.stderr)
            milliseconds = math.ceil(span * 1000)
            shortest = 0 if options.max_size else milliseconds
            run = _Run(gate.topic(f"topic-{number}", **policy), clock, options.events, shortest)
            run.send(_steps(events, milliseconds))
            rows.append({f"{name}_s": span} | run.result(len(events)))
    show_answer(rows, "simulate", as_json=options.json)
    if options.svg is not None:
        with _writing(options.svg):
            options.svg.write_text(draw(rows, name), encoding="utf-8")
    return 0


def _durations(text: str) -> list[float]:
    return [duration(one) for one in text.split(",")]


def _merge(text: str) -> object:
    """Parse a merge policy: a name, or a JSON object of field and name. The topic checks it."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r:.100} is not JSON, such as {{"total": "sum"}}') from None


def _policy(name: str, span: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a topic. Raises InvalidArgument if it would refuse them."""
    policy: dict[str, Any] = {name: span, "merge": options.merge, "max_size": options.max_size}
    if name == "quiet" or options.max_delay is not None:
        policy["max_delay"] = options.max_delay
    policy_of(**policy)
    return policy


def _check_chart(path: Path, events: Path) -> None:
    """Raise InvalidArgument if the chart cannot be written to `path`, or would overwrite the events."""
    with _writing(path):
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError("no file that can be written")
        if path.exists() and events.exists() and path.samefile(events):
            raise InvalidArgument("svg", str(path), "is the file of the events", "Name another file for the chart")


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgument("svg", str(path), f"cannot be written ({error})", "Name a file in a folder") from None


# -- events ----------------------------------------------------------------------------------------------------------


def read_events(path: Path) -> list[TrafficEvent]:
    """Read the events of a file of JSON lines, and order them by their time.

    Raises:
        InvalidArgument: the file cannot be read, or has no events, or a line is no event: the error names it.
    """
    lines = enumerate(read_lines(path, "events"), 1)
    events = [_event(line, number, path) for number, line in lines if line.strip()]
    if not events:
        raise InvalidArgument("events", str(path), "has no events", SHAPE)
    events.sort(key=lambda event: event.at)
    return events


def _event(line: str, number: int, path: Path) -> TrafficEvent:
    problem = "is no JSON object"
    try:
        found = json.loads(line)
        if isinstance(found, dict):
            fields = cast("dict[str, Any]", found)
            problem = 'has no "key" that is text or a whole number'
            key = fields["key"]
            if key != "" and type(key) in (str, int):
                problem = 'has no "at" that is a time in seconds or in ISO form'
                return TrafficEvent(_milliseconds(fields["at"]), key, fields.get("payload"), number)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    raise InvalidArgument(f"{path}:{number}", line.strip(), problem, SHAPE)


def _milliseconds(at: Any) -> int:
    if isinstance(at, str):
        moment = datetime.fromisoformat(at)
        at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(at, bool) or not isinstance(at, int | float):
        raise TypeError
    return round(at * 1000)


def _steps(events: Sequence[TrafficEvent], span: int) -> list[PlannedTrigger]:
    """Return the triggers in the order in which they are sent.

    Keys do not influence each other, and neither do events of one key that are at least `span` ms apart: no message
    waits for longer than that after its last trigger. So the events of a key are divided into bursts, and each burst
    is a key of its own here. Thousands of bursts begin at the same moment. This keeps all distances within a burst, and
    a call has hundreds of triggers, however slow the real traffic was.
    """
    tick = max(1, span // STEPS)
    open_bursts: dict[str | int, tuple[int, int, int]] = {}
    bursts, steps = 0, list[PlannedTrigger]()
    for event in events:
        burst, begin, last = open_bursts.get(event.key, (-1, 0, 0))
        if burst < 0 or event.at - last >= span:
            burst, begin, bursts = bursts, event.at, bursts + 1
        open_bursts[event.key] = burst, begin, event.at
        steps.append(PlannedTrigger(burst // TOGETHER * span + (event.at - begin) // tick * tick, burst, event))
    steps.sort(key=lambda step: step.at)
    return steps


# -- the topic -------------------------------------------------------------------------------------------------------


class _Run:
    """One topic that gets all events. `span` is the least time in ms from a trigger to its delivery."""

    def __init__(self, topic: Topic, clock: Clock, path: Path, span: int) -> None:
        self.deliveries = self.bytes = self.largest_bytes = self.dropped = 0
        self.largest: tuple[int, str | int] = (0, "")
        self.lateness = Counter[int]()
        self._calls, self._link = topic.open(), topic.definition.context.link
        self._clock, self._path, self._span = clock, path, span
        self._began = clock.microseconds() // 1000 + 1
        self._due: float = math.inf
        """When the first message in the store is due."""
        self._known = set[Script]()
        self._planned: list[PlannedTrigger] = []
        self._requests: list[Call[list[Receipt]]] = []
        self._acks: list[Call[Any]] = []
        self._waiting: defaultdict[int, list[PlannedTrigger]] = defaultdict(list)

    def send(self, steps: Iterable[PlannedTrigger]) -> None:
        """Send all triggers at their times, and take each message when it is due.

        What is sent until a message may be due is sent together, with the time of each call.
        """
        for at, group in groupby(steps, key=lambda step: step.at):
            while at >= (due := self._next_due()):
                self._exchange(due)
            self._plan(at, [*group])
            if len(self._planned) > AT_ONCE:
                self._exchange(at)
        while (due := self._next_due()) < math.inf:
            self._exchange(due)

    def result(self, events: int) -> dict[str, Any]:
        """Return what became of the events."""
        return {
            "events": events, "deliveries": self.deliveries,
            "saved_percent": round(100 * (1 - self.deliveries / events), 1),
            "lateness_p50_s": _percentile(self.lateness, 50) / 1000,
            "lateness_p99_s": _percentile(self.lateness, 99) / 1000,
            "largest_merge": self.largest[0], "of_key": self.largest[1], "largest_bytes": self.largest_bytes,
            "bytes": self.bytes, "dropped": self.dropped or None,
        }  # fmt: skip

    def _next_due(self) -> float:
        return min(self._due, self._planned[0].at + self._span) if self._planned else self._due

    def _plan(self, at: int, steps: list[PlannedTrigger]) -> None:
        self._clock.set((self._began + at) / 1000)
        try:
            batch = self._calls.trigger_many(Trigger(step.burst, step.event.payload) for step in steps)
        except InvalidArgument:
            self._name_line(steps)
            raise
        self._requests += batch.calls
        self._planned += steps

    def _name_line(self, steps: list[PlannedTrigger]) -> None:
        """Raise the error of the first payload that is refused, with its line."""
        for step in steps:
            try:
                self._calls.pack_trigger(Trigger(step.burst, step.event.payload))
            except InvalidArgument as error:
                place = f"{self._path}:{step.event.line}"
                raise InvalidArgument(place, error.value, error.problem, error.fix) from None

    def _exchange(self, at: float) -> None:
        """Send what is planned, and take what is due at `at`."""
        self._clock.set((self._began + at) / 1000)
        take = self._calls.take(0, MAX_ENTRIES)
        calls = [*self._acks, *self._requests]
        for script in {call.script for call in calls} - self._known:
            # A call of an unknown script would be sent again, behind the others.
            self._link.command("SCRIPT", "LOAD", script.text)
            self._known.add(script)
        answers = self._link.run_all(Batch(calls, list[Any]))
        taken = self._link.run(take)  # apart: a call that merges large messages leaves a part to another one
        receipts = chain.from_iterable(answers[len(self._acks) :])
        for step, receipt in zip(self._planned, receipts, strict=True):
            if receipt.accepted:
                self._waiting[step.burst].append(step)
            else:
                self.dropped += 1
        self._planned, self._requests = [], []
        self._due = taken.next_due_ms - self._began if taken.next_due_ms else math.inf
        ends = [Settlement("ack", delivery) for delivery in taken.deliveries]
        self._acks = [*self._calls.settle_many(ends).calls]
        for delivery in taken.deliveries:
            self._count(self._waiting.pop(int(delivery.key)), int(at), delivery.size)

    def _count(self, steps: list[PlannedTrigger], now: int, size: int) -> None:
        self.deliveries += 1
        self.bytes += size
        self.largest_bytes = max(self.largest_bytes, size)
        if len(steps) > self.largest[0]:
            self.largest = len(steps), steps[0].event.key
        self.lateness.update([now - step.at for step in steps])


def _percentile(counts: Counter[int], percent: int) -> int:
    """Return the value below or at which this percentage of the counted values is; 0 if there are none."""
    seen, needed = 0, counts.total() * percent
    for value, number in sorted(counts.items()):
        seen += number
        if 100 * seen >= needed:
            return value
    return 0
