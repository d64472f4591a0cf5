"""Calls that read histories: of a list beside a slot, and of all slots in which a key may be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from idemgate.core import keys
from idemgate.core.calls import Batch, Call, Plan, call, run_call, run_calls, stamp
from idemgate.core.clock import Clock
from idemgate.core.history import HISTORY_LASTS, KEPT, Transition, decode_transition, stored_key
from idemgate.core.keys import Key
from idemgate.presence.calls import list_names
from idemgate.store.context import Context
from idemgate.topics.messages import moment
from idemgate.topics.policy import slots_of
from idemgate.topics.registry import RegistryEntry, list_entries

__all__ = [
    "KeyHistory", "ask_names", "find_guard_history", "find_message_history", "join_histories", "lists_of",
    "read_history",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """The known transitions of a key in a topic or a scope.

    Attributes:
        transitions: Its transitions, the newest first.
        since: The time from which none is missing. Older ones may be there, too.
    """

    transitions: tuple[Transition, ...]
    since: datetime


def read_history(name: bytes, clock: Clock | None, raw_key: bytes) -> Call[KeyHistory]:
    """Build the call that reads what one list holds of a key, or of all keys: b""."""

    def read(reply: list[Any]) -> KeyHistory:
        now_ms, stored, oldest_ms = reply[1:4]
        since_ms = oldest_ms if stored >= KEPT else now_ms - HISTORY_LASTS
        transitions = tuple(decode_transition(entry) for entry in reply[4:])
        return KeyHistory(transitions, moment(since_ms))

    hidden = stored_key(raw_key, hidden=True) if raw_key else b""
    return call("history/read", (name,), (stamp(clock), stored_key(raw_key), hidden), read)


def find_message_history(context: Context, key: Key) -> dict[str, KeyHistory]:
    """Return the history of a key in each topic, by their names. Takes three round trips.

    The group of a key is unknown, so each slot is looked at, also those that the topic had before its number was
    changed. Most slots have no history: one plain command each asks for it.
    """
    link, raw_key = context.link, keys.raw(key)
    lists = {entry.name: lists_of(context, entry) for entry in link.run(list_entries(context.namespace, context.clock))}
    there = iter(link.probe([("EXISTS", name) for names in lists.values() for name in names]))
    # The call of a list that is absent tells the time, too.
    read = {topic: [name for name in names if next(there) != 0] or names[:1] for topic, names in lists.items()}
    calls = [read_history(name, context.clock, raw_key) for names in read.values() for name in names]
    answers = iter(link.run_all(Batch(calls, list[KeyHistory])))
    return {topic: join_histories(next(answers) for _ in names) for topic, names in read.items()}


def find_guard_history(context: Context, key: Key, scopes: Sequence[str]) -> Plan[dict[str, KeyHistory]]:
    """Return the history of a guarded key in each of these scopes, by their names."""
    raw_key = keys.raw(key)
    lists = [keys.scope_history(context.namespace, scope, raw_key) for scope in scopes]
    found = yield from run_calls(read_history(name, context.clock, raw_key) for name in lists)
    return dict(zip(scopes, found, strict=True))


def lists_of(context: Context, entry: RegistryEntry) -> list[bytes]:
    """Return the names of the lists of a topic, of its former numbers of slots, too."""
    counts = sorted({entry.decode(slots_of), *entry.was, *((entry.to,) if entry.to > 0 else ())})
    return [keys.slot_history(context.namespace, entry.name, slot, slots) for slots in counts for slot in range(slots)]


def join_histories(histories: Iterable[KeyHistory]) -> KeyHistory:
    """Return one history of several parts. None of its transitions is missing since the latest time of a part."""
    parts = list(histories)
    transitions = sorted((one for part in parts for one in part.transitions), key=lambda one: one.at, reverse=True)
    return KeyHistory(tuple(transitions), max(part.since for part in parts))


def ask_names(context: Context, ids: Iterable[str]) -> Plan[Mapping[str, str]]:
    """Return the names of processes by the ids with which transitions name them. Ask nothing if these are names."""
    if not any(_ID.fullmatch(one) for one in ids):
        return {}
    found = yield from run_call(list_names(context.namespace, context.clock))
    return {one: name for one, (name, _) in found.items()}


_ID = re.compile(r"[0-9a-f]{16}")
