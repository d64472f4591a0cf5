"""Trace an event: which deliveries took it, by which process, and how they ended.

It reads the histories of topics that have all transitions (`history=`). A message has the serial of its newest trigger.
So the deliveries of an event are those of its key that have at least the serial of its trigger, until one ends the
message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from idemgate.core import keys
from idemgate.core.calls import Plan, run_call, run_calls
from idemgate.core.history import Transition
from idemgate.core.keys import Key
from idemgate.errors import InvalidArgument
from idemgate.history.calls import ask_names, join_histories, lists_of, read_history
from idemgate.store.context import Context
from idemgate.topics.policy import DEFAULT, from_stored
from idemgate.topics.registry import RegistryEntry, list_entries

__all__ = ["EventTrace", "EventTraces", "TracedDelivery", "trace_event"]

_ACCEPTED = ("scheduled", "merged", "replaced")
_ENDS = ("acked", "cancelled", "buried", "forwarded")
"""Transitions that end a message."""
_ENDS_OF_LETTERS = ("redriven", "deleted", "outdated")
"""Transitions that end a dead letter. One that is redriven is a message again."""


@dataclass(frozen=True, slots=True)
class TracedDelivery:
    """A delivery of the message that an event is part of.

    Attributes:
        at: The time of the delivery, by the server's clock.
        token: Its fencing token.
        attempt: The number of the attempt, 0 if it is unknown.
        by: The process that took it, or an id of it if its name is unknown.
        ended_at: The time of the first outcome, or None.
        outcomes: What became of it: "acked", "nacked", "lapsed", ... Empty as long as it runs. After "lapsed" a "lost"
            says that it ended too late.
    """

    at: datetime
    token: int
    attempt: int
    by: str
    ended_at: datetime | None = None
    outcomes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EventTrace:
    """One trigger with an event id, and its deliveries.

    Attributes:
        topic: The topic.
        key: The key, or "#" and its SHA-1 if it has more than 128 bytes.
        at: The time of the trigger, by the server's clock.
        by: The process that sent it.
        status: What became of the trigger, as in `Receipt.status`; "dropped_version" or "dropped_full" say why it was
            dropped.
        deliveries: The deliveries that took it, the first one first. None of a trigger that was not accepted.
        outcome: How the message ended: "acked", "buried", "cancelled", "deleted", "outdated" or "forwarded". None if it
            is pending or in flight.
    """

    topic: str
    key: str
    at: datetime
    by: str
    status: str
    deliveries: tuple[TracedDelivery, ...] = ()
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class EventTraces:
    """The traces of an event, and where one was sought.

    Attributes:
        found: One for each trigger of the event, also of its duplicates, the oldest first.
        since: The topics whose history has all transitions, and the time from which none is missing in any slot. An
            event that is not found was not triggered there since then, by programs that knew of the option.
        untraced: The topics without `history=`. They tell nothing about events.
    """

    found: tuple[EventTrace, ...]
    since: Mapping[str, datetime] = field(default_factory=dict[str, datetime])
    untraced: tuple[str, ...] = ()


def trace_event(context: Context, event_id: Key, topic: str | None, key: Key | None) -> Plan[EventTraces]:
    """Return what became of an event; see `Gate.trace`."""
    entries = yield from run_call(list_entries(context.namespace, context.clock))
    if topic is not None and topic not in [entry.name for entry in entries]:
        raise InvalidArgument("topic", topic, "no such topic in the store", "List the topics: idemgate topic ls")
    sought = [entry for entry in entries if topic in (None, entry.name)]
    traced = [one for one in sought if one.decode(lambda stored: from_stored(stored, DEFAULT)).history is not None]
    raw_key = b"" if key is None else keys.raw(key)
    found, since = list[EventTrace](), dict[str, datetime]()
    for entry in traced:
        requests = [read_history(name, context.clock, raw_key) for name in lists_of(context, entry)]
        history = join_histories((yield from run_calls(requests)))
        since[entry.name] = history.since
        found += _follow(entry, event_id, raw_key, history.transitions[::-1])
    ids = [by for trace in found for by in (trace.by, *(one.by for one in trace.deliveries))]
    names = yield from ask_names(context, ids)
    untraced = tuple(entry.name for entry in sought if entry not in traced)
    found.sort(key=lambda trace: trace.at)
    return EventTraces(tuple(_with_names(trace, names) for trace in found), since, untraced)


def _follow(
    entry: RegistryEntry, event_id: Key, raw_key: bytes, transitions: Sequence[Transition]
) -> Iterator[EventTrace]:
    """Yield the traces of an event among the transitions of a topic, the oldest first."""
    for n, one in enumerate(transitions):
        if one.event and one.event in {keys.event(event_id, key, b"")[:16] for key in (raw_key, one.raw_key) if key}:
            status, later = one.what, [later for later in transitions[n + 1 :] if later.raw_key == one.raw_key]
            deliveries, outcome = _deliveries(one.serial, later) if status in _ACCEPTED else ((), None)
            yield EventTrace(entry.name, one.key, one.at, one.by, status, deliveries, outcome)


def _deliveries(serial: int, transitions: Iterable[Transition]) -> tuple[tuple[TracedDelivery, ...], str | None]:
    """Return the deliveries of a message with this serial or a later one, and how it ended."""
    taken, outcome, buried = dict[int, TracedDelivery](), None, 0
    for one in transitions:
        if one.what == "taken" and one.serial >= serial and outcome is None:
            assert one.token is not None
            taken[one.token] = TracedDelivery(one.at, one.token, one.attempts, one.by)
        elif one.token in taken and one.what != "cancel_asked":
            delivery = taken[one.token]
            ended_at, outcomes = delivery.ended_at or one.at, (*delivery.outcomes, one.what)
            taken[one.token] = replace(delivery, ended_at=ended_at, outcomes=outcomes)
        elif one.serial < serial:  # of an earlier message, or of one that nothing is known of
            continue
        if outcome is None and one.what in _ENDS:
            outcome, buried = one.what, one.serial
        elif outcome == "buried" and one.serial == buried and one.what in _ENDS_OF_LETTERS:
            outcome = None if one.what == "redriven" else one.what
    return tuple(taken.values()), outcome


def _with_names(trace: EventTrace, names: Mapping[str, str]) -> EventTrace:
    deliveries = tuple(replace(one, by=names.get(one.by, one.by)) for one in trace.deliveries)
    return replace(trace, by=names.get(trace.by, trace.by), deliveries=deliveries)
