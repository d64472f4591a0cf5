"""`idemgate topics`, `slots` and `delete`: list and change topics without the program that declared them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from idemgate.cli.arguments import add_namespace, add_url, url_of
from idemgate.core.text import one_line
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.topics.registry import StoredTopic
from idemgate.topics.reshard import ReshardProgress
from idemgate.topics.topic import Topic

__all__ = ["add_to"]

SLOTS = """\
Change the number of slots of a topic, a power of two, while programs use it. Messages move part by part. A call that
needs the part being moved waits. Nothing is lost or repeated. After an interruption, run the same command again: it
continues."""
DELETE = """\
Delete a topic from the store. Refused while the topic holds messages or dead letters, unless --discard is given."""
COLUMNS = ("topic", "slots", "scheduled", "ready", "waiting", "blocked", "in flight", "dead", "next due", "")


def add_to(commands: Any) -> None:
    """Add the commands to a parser."""
    listing = _command(commands, "topics", list_topics, "show the topics that a store holds")
    listing.add_argument("--json", action="store_true", help="as JSON, with policies and counters")
    listing.add_argument(
        "--active", action="store_true", help="only topics that hold a message or dead letter, are paused or change"
    )
    slots = _command(commands, "slots", reshard_topic, "change the number of slots of a topic", SLOTS)
    slots.add_argument("topic", metavar="TOPIC")
    slots.add_argument("slots", metavar="N", type=int, help="a power of two")
    delete = _command(commands, "delete", delete_topic, "delete a topic", DELETE)
    delete.add_argument("topic", metavar="TOPIC")
    delete.add_argument("--discard", action="store_true", help="also delete its messages and dead letters")


def _command(commands: Any, name: str, command: Callable[..., int], text: str, about: str | None = None) -> Any:
    parser = commands.add_parser(name, help=text, description=about or text)
    add_url(parser)
    add_namespace(parser)
    parser.set_defaults(command=command)
    return parser


def _gate(options: argparse.Namespace) -> Gate:
    return Gate(url_of(options), namespace=options.namespace)


def list_topics(options: argparse.Namespace) -> int:
    """Print the topics of the store. Return 0."""
    with _gate(options) as gate:
        found = gate.stored_topics(active=options.active)
    if options.json:
        print(json.dumps([_facts(one) for one in found], indent=2))
    elif not found:
        kind = "active topics" if options.active else "topics"
        print(f"no {kind} in namespace {options.namespace!r} (--namespace names another)")
    else:
        _show([_row(one) for one in found])
    return 0


def reshard_topic(options: argparse.Namespace) -> int:
    """Change the number of slots of a topic. Return 0. Raises InvalidArgument, TopicInUse, StoreError."""
    with _gate(options) as gate:
        done = _find_topic(gate, options.topic).reshard(options.slots, _progress_printer())
    name = one_line(options.topic)
    if done.before == done.after:
        print(f"{name} has {done.after} slots already")
    else:
        print(f"{name} has {done.after} slots, before it had {done.before}; {done.moved} entries were moved")
    return 0


def delete_topic(options: argparse.Namespace) -> int:
    """Delete a topic. Return 0. Raises InvalidArgument, TopicInUse, StoreError."""
    with _gate(options) as gate:
        gone = _find_topic(gate, options.topic).delete(discard=options.discard)
    print(f"{one_line(options.topic)} is deleted", end="")
    if any((gone.pending, gone.in_flight, gone.dead)):
        print(f"; discarded: {gone.pending} pending, {gone.in_flight} in flight, {gone.dead} dead letters", end="")
    print()
    return 0


def _find_topic(gate: Gate, name: str) -> Topic:
    """Return a stored topic. Raises InvalidArgument for an unknown name, instead of creating a topic."""
    there = [one.name for one in gate.stored_topics()]
    if name not in there:
        raise InvalidArgument(
            "TOPIC", name, "no such topic in the store", f"There are: {', '.join(map(one_line, there)) or 'none'}"
        )
    return gate.topic(name)


def _progress_printer() -> Callable[[ReshardProgress], None]:
    """Return a callback that prints the progress, at most once a second."""
    said = time.monotonic()

    def tell(progress: ReshardProgress) -> None:
        nonlocal said
        if time.monotonic() - said >= 1:
            said = time.monotonic()
            print(f"{progress.done} of {progress.parts} parts, {progress.moved} entries moved", file=sys.stderr)

    return tell


def _facts(topic: StoredTopic) -> dict[str, object]:
    stats = topic.stats
    return {
        "name": topic.name, "slots": topic.slots, "changing_to": topic.changing_to, "policy": topic.policy.describe(),
        "scheduled": stats.scheduled, "ready": stats.ready, "waiting": stats.waiting, "blocked": stats.blocked,
        "in_flight": stats.in_flight, "dead": stats.dead, "paused": stats.paused,
        "next_due": stats.next_due.isoformat() if stats.next_due else None, "counters": dict(stats.counters),
    }  # fmt: skip


def _row(topic: StoredTopic) -> Sequence[str]:
    stats = topic.stats
    numbers = (stats.scheduled, stats.ready, stats.waiting, stats.blocked, stats.in_flight, stats.dead)
    due = f"{stats.next_due:%Y-%m-%d %H:%M:%S}Z" if stats.next_due else "-"
    return (one_line(topic.name), str(topic.slots), *map(str, numbers), due, _condition(topic))


def _condition(topic: StoredTopic) -> str:
    if topic.changing_to is not None:
        return f"changing to {topic.changing_to} slots" if topic.changing_to else "being deleted"
    return "paused" if topic.stats.paused else ""


def _show(rows: list[Sequence[str]]) -> None:
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(*COLUMNS)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
