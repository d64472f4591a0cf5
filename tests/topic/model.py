"""What one slot of a topic must do, in plain Python with nothing of the package in it. Times in ms, plain replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha1
from typing import Any

SILENT = "lease lapsed: its worker vanished or stalled"


@dataclass
class Rules:
    window: int | None = None
    quiet: int | None = None
    max_delay: int | None = None
    max_size: int | None = None
    leading: bool = False
    merge: Callable[[list[int]], Any] = lambda payloads: payloads[-1]
    kept: int | None = None  # items an append has room for
    lease: int = 20_000
    max_attempts: int = 3
    retention: int = 60_000
    max_dead: int = 3
    remember: int = 30_000


@dataclass
class Message:
    payloads: list[int]
    first: int
    last: int
    due: int
    why: str
    version: int | None = None
    attempts: int = 0
    pinned: bool = False
    failure: str = ""

    def joined(self, newer: Message) -> Message:
        """This one with a newer one in it; when it is due, and its attempts, stay."""
        version = self.version if newer.version is None else newer.version
        first, last = min(self.first, newer.first), max(self.last, newer.last)
        return replace(self, payloads=self.payloads + newer.payloads, first=first, last=last, version=version)


@dataclass
class Flight:
    token: int
    message: Message
    due: int
    lease_end: int
    cancelled: bool = False


@dataclass
class Letter:
    token: int
    key: str
    message: Message
    reason: str
    died: int


@dataclass
class Model:
    rules: Rules
    now: int
    pending: dict[str, Message] = field(default_factory=dict)
    scheduled: dict[str, int] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)
    dead: list[Letter] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    memo: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)
    token: int = 0

    def _recall(self, *name: str) -> int | None:
        value, expires = self.memo.get(name, (0, 0))
        return value if expires > self.now else None

    # -- trigger ------------------------------------------------------------------------------------------------------

    def trigger(
        self, key: str, payload: int, at: int | None = None, version: int | None = None, event: str | None = None
    ) -> tuple[str, int | None]:
        """(receipt, due)"""
        receipt = self._refusal(key, version, event)
        due: int | None = None
        if receipt is None:
            receipt, due = self._put(key, payload, at, version)
            self.counters["accepted"] += 1
            forget = self.now + self.rules.remember
            if event is not None:
                # Counted from when it is due: an occurrence that was planned ahead is not planned again.
                self.memo["event", event, key] = (1, max(self.now, due) + self.rules.remember)
            if version is not None:
                self.memo["version", key] = (version, forget)
            if self.rules.leading:
                self.memo["door", key] = (1, self.now + (self.rules.window or self.rules.quiet or 0))
        if receipt != "scheduled":
            self.counters[receipt] += 1
        return receipt, due

    def _refusal(self, key: str, version: int | None, event: str | None) -> str | None:
        if event is not None and self._recall("event", event, key) is not None:
            return "duplicate"
        newest = self._recall("version", key)
        if version is not None and newest is not None and version < newest:
            return "dropped"
        if self.rules.leading and self._recall("door", key) is not None:
            if self.rules.quiet:
                self.memo["door", key] = (1, self.now + self.rules.quiet)
            return "dropped"
        return None

    def _put(self, key: str, payload: int, at: int | None, version: int | None) -> tuple[str, int]:
        new = Message([payload], self.now, self.now, self.now, "now", version)
        old = self.pending.get(key)
        message = new if old is None else old.joined(new)
        if self.scheduled.get(key, message.due) != message.due:
            message.due, message.why = self.scheduled[key], "flush"
        receipt = "scheduled" if old is None else "merged"
        if at is not None:
            message.due, message.why, message.pinned = max(at, self.now), "time", True
            receipt = "scheduled" if old is None else "replaced"
        elif not message.pinned and message.attempts == 0:
            self._time(message, old is None)
        self._keep(key, message)
        return receipt, message.due

    def _time(self, message: Message, fresh: bool) -> None:
        rules = self.rules
        if rules.leading:
            if fresh:
                message.due, message.why = self.now, "leading"
            return
        if rules.window and fresh:
            message.due, message.why = self.now + rules.window, "window"
        if rules.quiet:
            message.due, message.why = self.now + rules.quiet, "quiet"
            if rules.max_delay and message.first + rules.max_delay < message.due:
                message.due, message.why = message.first + rules.max_delay, "max_delay"
        if rules.max_size and len(message.payloads) >= rules.max_size and message.due > self.now:
            message.due, message.why = self.now, "max_size"

    def _keep(self, key: str, message: Message) -> None:
        self.pending[key] = message
        if key not in self.flights:
            self.scheduled[key] = message.due

    # -- take and settle ----------------------------------------------------------------------------------------------

    def take(self, n: int) -> tuple[list[tuple[str, int]], int]:
        """((key, token) of each delivery, lapsed)"""
        lapsed = sorted((flight.lease_end, key) for key, flight in self.flights.items() if flight.lease_end <= self.now)
        for _, key in lapsed:
            self._reclaim(key)
        self.counters["lapsed"] += len(lapsed)
        ripe = sorted((due, key) for key, due in self.scheduled.items() if due <= self.now)[:n]
        for due, key in ripe:
            del self.scheduled[key]
            message = self.pending.pop(key)
            message.attempts += 1
            if due != message.due:
                message.due, message.why = due, "flush"
            self.token = max(self.token + 1, self.now * 1000)
            self.flights[key] = Flight(self.token, message, due, self.now + self.rules.lease)
        self.counters["taken"] += len(ripe)
        return [(key, self.flights[key].token) for _, key in ripe], len(lapsed)

    def _reclaim(self, key: str) -> None:
        flight = self.flights.pop(key)
        if flight.cancelled:
            self._call_off(key, flight)
        elif flight.message.attempts >= self.rules.max_attempts:
            self._bury(key, flight, SILENT)
        else:
            flight.message.failure = SILENT
            # The second time apart from its neighbours, somewhere within a lease.
            spread = int(sha1(f"{key}{flight.token}".encode()).hexdigest()[:8], 16) % self.rules.lease
            spread *= flight.message.attempts >= 2
            self._restore(key, flight.message, self.now + spread, "retry")

    def settle(self, verb: str, key: str, token: int, delay: int, failure: str) -> str:
        flight = self.flights.get(key)
        if flight is None or flight.token != token:
            self.counters["lost"] += 1
            return "lost"
        del self.flights[key]
        message = flight.message
        if verb == "ack":
            self.counters["acked"] += 1
            self.counters["acked_triggers"] += len(message.payloads)
            self._promote(key)
        elif verb == "bury":
            self._bury(key, flight, failure)
            return "dead"
        elif flight.cancelled:
            self._call_off(key, flight)
            return "cancelled"
        elif verb == "return":
            self.counters["returned"] += 1
            message.attempts -= 1
            self._restore(key, message, message.due, message.why)
        else:
            self.counters["nacked"] += 1
            if message.attempts >= self.rules.max_attempts:
                self._bury(key, flight, failure)
                return "dead"
            message.failure, message.pinned = failure, False
            self._restore(key, message, self.now + delay, "retry")
        return "ok"

    def extend(self, key: str, token: int, lease: int) -> str:
        flight = self.flights.get(key)
        if flight is None or flight.token != token:
            return "lost"
        flight.lease_end = self.now + lease
        return "cancelled" if flight.cancelled else "ok"

    def holds(self, key: str, token: int) -> bool:
        """Whether this token is that of the key's live delivery."""
        return key in self.flights and self.flights[key].token == token

    def _promote(self, key: str) -> None:
        if key in self.pending:
            self.scheduled[key] = self.pending[key].due

    def _restore(self, key: str, message: Message, due: int, why: str) -> None:
        message.due, message.why = due, why
        waiting = self.pending.get(key)
        if waiting is not None:
            self.counters["folded"] += 1
            older, newer = (waiting, message) if waiting.last < message.last else (message, waiting)
            time = waiting if waiting.pinned else message
            message = replace(
                older.joined(newer),
                due=time.due,
                why=time.why,
                pinned=time.pinned,
                attempts=message.attempts,
                failure=message.failure,
            )
        self._keep(key, message)

    def _call_off(self, key: str, flight: Flight) -> None:
        self.counters["cancelled"] += 1
        self.counters["cancelled_triggers"] += len(flight.message.payloads)
        self._promote(key)

    def _bury(self, key: str, flight: Flight, reason: str) -> None:
        self.counters["buried"] += 1
        self.counters["buried_triggers"] += len(flight.message.payloads)
        self.dead.append(Letter(flight.token, key, flight.message, reason, self.now))
        self.dead.sort(key=lambda letter: (letter.died, letter.token))
        old = [letter for letter in self.dead if letter.died <= self.now - self.rules.retention]
        old = old or self.dead[: max(0, len(self.dead) - self.rules.max_dead)]
        for letter in old:
            self.dead.remove(letter)
            self.counters["expired"] += 1
            self.counters["expired_triggers"] += len(letter.message.payloads)
        self._promote(key)

    # -- changes ------------------------------------------------------------------------------------------------------

    def cancel(self, key: str) -> str:
        message, flight = self.pending.pop(key, None), self.flights.get(key)
        if message is not None:
            self.scheduled.pop(key, None)
            self.counters["cancelled"] += 1
            self.counters["cancelled_triggers"] += len(message.payloads)
        if flight is not None:
            flight.cancelled = True
            return "in_flight"
        return "absent" if message is None else "cancelled"

    def reschedule(self, key: str, at: int) -> str:
        if key not in self.pending:
            return "in_flight" if key in self.flights else "absent"
        message = self.pending[key]
        message.due, message.why, message.pinned = max(at, self.now), "time", True
        self._keep(key, message)
        return "rescheduled"

    def flush(self, key: str) -> int:
        message = self.pending.get(key)
        if message is None or self.scheduled.get(key, message.due) <= self.now:
            return 0
        message.due, message.why = self.now, "flush"
        self._keep(key, message)
        return 1

    def flush_all(self) -> tuple[int, int]:
        """(moved, left)"""
        later = [key for key, due in self.scheduled.items() if due > self.now]
        for key in later:
            self.scheduled[key] = self.now
        return len(later) + sum(self.flush(key) for key in self.pending if key in self.flights), 0

    def exhume(self, verb: str, tokens: list[int]) -> tuple[int, int]:
        """(taken out, left)"""
        found = 0
        for token in tokens or [letter.token for letter in self.dead]:
            letter = next((letter for letter in self.dead if letter.token == token), None)
            if letter is not None:
                found += 1
                self.dead.remove(letter)
                counter = "redriven" if verb == "redrive" else "deleted"
                self.counters[counter] += 1
                self.counters[f"{counter}_triggers"] += len(letter.message.payloads)
                if verb == "redrive":
                    letter.message.attempts, letter.message.pinned = 0, False
                    self._restore(letter.key, letter.message, self.now, "redrive")
        return found, len(self.dead)

    # -- what is to be seen -------------------------------------------------------------------------------------------

    def next_work(self) -> int:
        return min([*self.scheduled.values(), *(flight.lease_end for flight in self.flights.values())], default=0)

    def shown(self, message: Message | None) -> Any:
        if message is None:
            return None
        dropped = max(0, len(message.payloads) - self.rules.kept) if self.rules.kept else 0
        return (
            len(message.payloads), self.rules.merge(message.payloads), message.first, message.last, message.attempts,
            message.why, message.version, message.failure, dropped,
        )  # fmt: skip

    def peek(self, key: str) -> Any:
        flight = self.flights.get(key)
        message = self.pending.get(key)
        due = self.scheduled.get(key, message.due) if message else None
        return self.shown(message), due, flight and (self.shown(flight.message), flight.token, flight.lease_end)

    def stats(self) -> Any:
        ready = sum(due <= self.now for due in self.scheduled.values())
        waiting = len(self.pending) - len(self.scheduled)
        places = (len(self.scheduled) - ready, ready, waiting, len(self.flights), len(self.dead))
        return places, min(self.scheduled.values(), default=None), {name: n for name, n in self.counters.items() if n}

    def letters(self) -> Any:
        return [(one.token, one.key, one.reason, one.died, self.shown(one.message)) for one in reversed(self.dead)]

    def unaccounted(self) -> int:
        """Accepted triggers that are nowhere: has to be 0, always."""
        held = [*self.pending.values(), *(one.message for one in (*self.flights.values(), *self.dead))]
        gone = sum(self.counters[f"{end}_triggers"] for end in ("acked", "cancelled", "deleted", "expired"))
        return self.counters["accepted"] - gone - sum(len(message.payloads) for message in held)
