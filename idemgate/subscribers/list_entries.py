"""Entries of a Redis list and the script calls of one consumer. All keys of a call have the list's cluster slot."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal, NamedTuple

from idemgate.core.calls import Call, call, new_id, stamp
from idemgate.core.clock import Clock
from idemgate.core.keys import list_keys
from idemgate.subscribers.reader import HeldEntry

__all__ = ["ListCalls", "ListEntry", "TakenEntry", "encode_dead_letter"]


@dataclass(slots=True)
class ListEntry:
    """One entry of a list, as passed to its callback.

    Attributes:
        list: Name of the list.
        id: Identifier of this entry, unique in the list. A second push of the same data has another one.
        data: The entry as it was pushed. `topic.decode_forwarded(entry.data)` decodes a message that a topic forwarded.
        deliveries: Number of the attempt, from 1. It rises with every failed attempt, and when a consumer died. An
            attempt that failed while the store was unavailable may not be counted.
    """

    list: str
    id: str
    data: bytes
    deliveries: int = 1

    def json(self) -> Any:
        """Decode the data as JSON; raise ValueError if it is invalid."""
        return json.loads(self.data)


class TakenEntry(HeldEntry):
    """An entry that this consumer holds. `state` is the stored state of this delivery; no other delivery has it."""

    __slots__ = ("state",)

    def __init__(self, name: str, number: bytes, state: bytes, data: bytes) -> None:
        super().__init__(number, ListEntry(name, number.decode(), data, int(state.split()[0])))
        self.state: bytes = state


class TakenEntries(NamedTuple):
    """The reply of a take.

    `next_ms` is the time until the next lease or delay ends, None without one. `missing` counts entries whose data was
    deleted.
    """

    entries: list[TakenEntry]
    next_ms: int | None
    missing: int


class ListCalls:
    """The calls of one consumer of a list."""

    def __init__(
        self,
        name: str,
        consumer: str,
        clock: Clock | None,
        *,
        lease_ms: int,
        pop: Literal["left", "right"],
        max_dead_letters: int,
    ) -> None:
        self.source: bytes
        self.incoming: bytes
        self.source, self.incoming, self._leases, self._state, self._data, self._dead = list_keys(name)
        self._name = name
        self._consumer = consumer
        self._clock = clock
        self._lease_ms = lease_ms
        self._pop = pop
        self._max_dead_letters = max_dead_letters

    def take(self, most: int) -> Call[TakenEntries]:
        """Build the call that takes at most `most` entries."""
        keys = (self.source, self.incoming, self._leases, self._state, self._data)
        args = (stamp(self._clock), new_id().hex(), self._consumer, self._lease_ms, most, self._pop)
        return call("subscribers/lists/take", keys, args, self._read_taken)

    def _read_taken(self, reply: list[Any]) -> TakenEntries:
        _, now_ms, next_ms, missing, *rest = reply
        rows = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        entries = [TakenEntry(self._name, *row) for row in rows]
        return TakenEntries(entries, max(0, next_ms - now_ms) if next_ms else None, missing)

    def renew(self, entries: Iterable[TakenEntry]) -> Call[list[bool]]:
        """Build the call that renews leases. The answer says of each entry whether this consumer still holds it."""
        args: list[bytes | str | int] = [stamp(self._clock), self._lease_ms]
        for one in entries:
            args += [one.id, one.state]
        return call("subscribers/lists/renew", (self._leases, self._state), args, _read_renewed)

    def remove(self, ids: Sequence[bytes]) -> Call[int | None]:
        """Build the call that removes handled entries."""
        return self._settle(*((number, "", "done", "") for number in ids))

    def retry(self, entry: TakenEntry, after_ms: int, *, undo: bool) -> Call[int | None]:
        """Build the call that delays an entry's next delivery. With `undo` this delivery counts as no attempt."""
        return self._settle((entry.id, entry.state, "undo" if undo else "retry", after_ms))

    def bury(self, entry: TakenEntry, letter: bytes) -> Call[int | None]:
        """Build the call that moves an entry to the dead letters.

        Its answer is the number of dead letters that were dropped, or None if another consumer has the entry.
        """
        return self._settle((entry.id, entry.state, "dead", letter))

    def _settle(self, *settlements: tuple[bytes | str | int, ...]) -> Call[int | None]:
        keys = (self._leases, self._state, self._data, self._dead)
        args = (stamp(self._clock), self._max_dead_letters, *chain.from_iterable(settlements))
        return call("subscribers/lists/settle", keys, args, _read_settled)


def _read_renewed(reply: list[Any]) -> list[bool]:
    return [word == b"renewed" for word in reply[2:]]


def _read_settled(reply: list[Any]) -> int | None:
    return reply[2] if b"lost" not in reply[3:] else None


def encode_dead_letter(taken: TakenEntry, reason: str, error: str) -> bytes:
    """Return a dead letter as JSON: `id`, `deliveries`, `reason`, `error`, `at`, and `data` or `data_base64`.

    `data_base64` holds data that is not UTF-8.
    """
    entry = taken.entry
    letter: dict[str, object] = {"id": entry.id, "deliveries": entry.deliveries, "reason": reason, "error": error}
    letter["at"] = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        letter["data"] = entry.data.decode()
    except UnicodeDecodeError:
        letter["data_base64"] = b64encode(entry.data).decode()
    return json.dumps(letter).encode()
