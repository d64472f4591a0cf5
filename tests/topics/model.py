"""What one slot of a topic must do, in plain Python with nothing of the package in it. Times in ms, plain replies.

A message is pending, in flight, or dead, and that is all: what is scheduled, ready, waiting or blocked follows from the
time, the deliveries in flight and the groups, at each call. So there are no queues to move it between, and no
order in which anything must be done but the one that is promised: the best rank first, of what may go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha1
from typing import Any

SILENT = "lease lapsed: its worker vanished or stalled"
NEVER = 1 << 60


@dataclass(frozen=True)
class Rules:
    """The policy, as it is for this slot. Durations in ms."""

    window: int | None = None
    quiet: int | None = None
    max_delay: int | None = None
    max_size: int | None = None
    leading: bool = False
    merge: Callable[[list[int]], Any] = lambda payloads: payloads[-1]
    replaces: bool = False  # the newest payload is all there is
    kept: int | None = None  # items an append has room for
    lease: int = 20_000
    max_attempts: int = 3
    retention: int = 60_000
    max_dead: int = 2
    remember: int = 30_000
    ranked: bool = False
    boost: int = 0  # what a point of priority is worth; 0 = strict
    together: int = 1  # deliveries of a group at a time
    most: int | None = None  # in flight
    interval: int | None = None  # us between two deliveries
    burst: int = 1


@dataclass
class Message:
    payloads: list[int]
    first: int
    last: int
    due: int
    why: str
    version: int | None = None
    priority: int | None = None
    group: str = ""
    attempts: int = 0
    earlier: int = 0  # attempts that ended before its newest trigger
    dropped: int = 0  # items for which it had no room
    pinned: bool = False  # its caller named the time
    failure: str = ""
    holds: bool = False  # a place in its group, though it is not in flight: it came back and will be tried again
    former: bool = False  # there was another policy when it came; what it then ranked is not promised
    serial: int = 0  # numbers its newest trigger

    def joined(self, newer: Message) -> Message:
        """This one with a newer one in it; when it is due, and its attempts, stay."""
        return replace(
            self,
            payloads=self.payloads + newer.payloads,
            first=min(self.first, newer.first),
            last=max(self.last, newer.last),
            version=self.version if newer.version is None else newer.version,
            priority=self.priority if newer.priority is None else newer.priority,
            group=newer.group,
            former=self.former or newer.former,
            serial=max(self.serial, newer.serial),
        )

    @property
    def is_fresh(self) -> bool:
        """Whether it has one trigger, and neither an attempt nor a change of its time: its serial decides its turn."""
        return len(self.payloads) == 1 and self.attempts == 0 and self.why in ("now", "window", "quiet")


@dataclass
class Flight:
    token: int
    message: Message
    lease_end: int
    cancelled: bool = False
    extended: bool = False


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
    flights: dict[str, Flight] = field(default_factory=dict)
    dead: list[Letter] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    memo: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)
    token: int = 0
    paused: bool = False
    buried: bool = False  # something, in this call
    spent: int = 0  # us of the rate's burst that were used at `spent_at`, in ms
    spent_at: int = 0

    def _recall(self, *name: str) -> int | None:
        value, expires = self.memo.get(name, (0, 0))
        return value if expires > self.now else None

    def _count(self, name: str, message: Message) -> None:
        self.counters[name] += 1
        self.counters[f"{name}_triggers"] += len(message.payloads)

    def redefine(self, rules: Rules) -> None:
        self.rules = rules
        for message in self._messages():
            message.former = True

    def _messages(self) -> Iterator[Message]:
        yield from self.pending.values()
        yield from (one.message for one in (*self.flights.values(), *self.dead))

    # -- trigger ------------------------------------------------------------------------------------------------------

    def trigger(
        self,
        key: str,
        payload: int,
        at: int | None = None,
        priority: int | None = None,
        group: str = "",
        version: int | None = None,
        event: str | None = None,
    ) -> tuple[str, int | None]:
        """(receipt, due)"""
        receipt = self._refusal(key, version, event)
        due: int | None = None
        if receipt is None and self._is_full(key):
            receipt = "dropped"
            self.counters["dropped_full"] += 1
        if receipt is None:
            self.counters["accepted"] += 1
            serial = self.counters["accepted"]
            new = Message([payload], self.now, self.now, self.now, "now", version, priority, group, serial=serial)
            receipt, due = self._put(key, new, at)
            if event is not None:
                # Counted from when it is due: an occurrence that was planned ahead is not planned again.
                self.memo["event", event, key] = (1, max(self.now, due) + self.rules.remember)
            if version is not None:
                self.memo["version", key] = (version, self.now + self.rules.remember)
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
            self.counters["dropped_version"] += 1
            return "dropped"
        if self.rules.leading and self._recall("door", key) is not None and not self._is_undone(key):
            if self.rules.quiet:
                self.memo["door", key] = (1, self.now + self.rules.quiet)
            self.counters["dropped_window"] += 1
            return "dropped"
        return None

    def _is_undone(self, key: str) -> bool:
        """Whether the delivery of a key lapsed and is not tried again, though no take has found it yet."""
        flight = self.flights.get(key)
        if flight is None or flight.lease_end > self.now or key in self.pending:
            return False
        return flight.cancelled or self._is_exhausted(flight.message)

    def _is_full(self, key: str) -> bool:
        """Whether the pending message has no room for a trigger, which it counts."""
        old = self.pending.get(key)
        if old is None or not self.rules.kept or not (old.dropped or len(old.payloads) >= self.rules.kept):
            return False
        old.dropped += 1
        self.counters["items_dropped"] += 1
        return True

    def _put(self, key: str, new: Message, at: int | None) -> tuple[str, int]:
        old = self.pending.get(key)
        message = new if old is None else old.joined(new)
        receipt, failed = "scheduled" if old is None else "merged", message.attempts > 0
        if failed:
            self._restart(message)
        if at is not None:
            self._pin(message, at)
            receipt = "scheduled" if old is None else "replaced"
        elif failed and self.rules.replaces and not message.pinned:
            message.due, message.why = self.now, "now"
            self._time(message, True)
            message.due = max(message.due, self.now)
        elif not (message.pinned or failed or message.earlier or message.why == "retry"):
            self._time(message, old is None)
        if old is not None and (message.group != old.group or message.due > old.due):
            message.holds = False
        self.pending[key] = message
        return receipt, message.due

    def _restart(self, message: Message) -> None:
        """A trigger joins a message that failed: its attempts start anew. What else is in it still has those before."""
        if self.rules.replaces:
            message.failure, message.earlier = "", 0
        else:
            message.earlier += message.attempts
        message.attempts = 0

    def _is_exhausted(self, message: Message) -> bool:
        most = self.rules.max_attempts
        return message.attempts >= most or message.attempts + message.earlier >= 2 * most

    def _pin(self, message: Message, at: int) -> None:
        """A time named by its caller may be far: no group waits for that."""
        message.due, message.why, message.pinned, message.holds = max(at, self.now), "time", True, False

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

    # -- what may go --------------------------------------------------------------------------------------------------

    def _standing(self) -> dict[str, Message]:
        """What is pending and not behind a delivery of its own key."""
        return {key: message for key, message in self.pending.items() if key not in self.flights}

    def _ripe(self) -> dict[str, Message]:
        return {key: message for key, message in self._standing().items() if message.due <= self.now}

    def _inside(self, group: str) -> int:
        """How many are in a group: in flight, or to be tried again."""
        flying = [flight.message for flight in self.flights.values()]
        held = [message for message in self.pending.values() if message.holds]
        return sum(message.group == group for message in flying + held)

    def _fits(self, message: Message) -> bool:
        return message.group == "" or message.holds or self._inside(message.group) < self.rules.together

    def _rank(self, message: Message) -> tuple[int, int]:
        if not self.rules.ranked:
            return (message.due, 0)
        if self.rules.boost:
            return (message.due - (message.priority or 0) * self.rules.boost, message.due)
        return (-(message.priority or 0), message.due)

    def _best(self) -> set[str]:
        """Return the keys that may go next: those of the best rank, and those whose rank is not promised.

        A message of a former policy may stand in front of its group, and hide others of the group behind it.
        """
        may = {key: message for key, message in self._ripe().items() if self._fits(message)}
        hidden = {message.group for message in may.values() if message.former and message.group}
        shown = [message for message in may.values() if not message.former and message.group not in hidden]
        best = min(map(self._rank, shown), default=(NEVER, NEVER))
        return {
            key
            for key, message in may.items()
            if message.former or (self._rank(message) <= best and not self._is_overtaking(message, may))
        }

    def _is_overtaking(self, message: Message, may: dict[str, Message]) -> bool:
        """Whether an earlier message of its group may go, which was accepted for the same time."""
        return message.group != "" and message.is_fresh and any(
            one.group == message.group and one.is_fresh and not one.former
            and self._rank(one) == self._rank(message) and one.serial < message.serial
            for one in may.values()
        )  # fmt: skip

    def _saved(self) -> int:
        """How much of the burst there is, us."""
        full = self.rules.burst * (self.rules.interval or 0)
        return full - max(0, self.spent - (self.now - self.spent_at) * 1000)

    def _room(self) -> int:
        """How many deliveries the limits permit now."""
        if self.paused:
            return 0
        room = NEVER
        if self.rules.most is not None:
            room = max(0, self.rules.most - len(self.flights))
        if self.rules.interval:
            room = min(room, self._saved() // self.rules.interval)
        return room

    # -- take and settle ----------------------------------------------------------------------------------------------

    def take(self, n: int, chosen: Sequence[str] = ()) -> tuple[list[tuple[str, int]], int]:
        """((key, token) of each delivery, lapsed). Among equals the server chooses."""
        ended = {key: flight for key, flight in self.flights.items() if flight.lease_end <= self.now}
        # Of those that end in the same ms, an extended lease starts with the ms, the others with their tokens.
        lapsed = sorted((one.lease_end, 0 if one.extended else one.token % 1000, key) for key, one in ended.items())
        for *_, key in lapsed:
            self._reclaim(key)
        self.discard()
        self.counters["lapsed"] += len(lapsed)
        out: list[str] = []
        room = min(n, self._room())
        while len(out) < room and (best := self._best()):
            wish = chosen[len(out)] if len(out) < len(chosen) else None
            out.append(wish if wish in best else min(best))
            if len(out) == 1:  # one token for all
                self.token = max(self.token + 1, self.now * 1000)
            self._hand_out(out[-1])
        self.counters["taken"] += len(out)
        each = self.rules.interval or 0
        self.spent, self.spent_at = self.rules.burst * each - self._saved() + len(out) * each, self.now
        return [(key, self.flights[key].token) for key in out], len(lapsed)

    def _hand_out(self, key: str) -> None:
        message = self.pending.pop(key)
        message.attempts += 1
        message.holds = False
        self.flights[key] = Flight(self.token, message, self.now + self.rules.lease)

    def _reclaim(self, key: str) -> None:
        flight = self.flights.pop(key)
        if flight.cancelled:
            self._count("cancelled", flight.message)
            self._open_door(key)
        elif self._is_exhausted(flight.message):
            self._bury(key, flight.message, flight.token, SILENT)
        else:
            flight.message.failure = SILENT
            # The second time apart from its neighbours, somewhere within a lease.
            spread = int(sha1(f"{key}{flight.token}".encode()).hexdigest()[:8], 16) % self.rules.lease
            spread *= flight.message.attempts + flight.message.earlier >= 2
            self._try_again(key, flight.message, spread)

    def settle(self, verb: str, key: str, token: int, delay: int, failure: str) -> str:
        if not self.holds(key, token):
            self.counters["lost"] += 1
            return "lost"
        flight = self.flights.pop(key)
        message = flight.message
        if verb == "ack":
            self._count("acked", message)
            return "ok"
        if verb == "bury":
            self._bury(key, message, token, failure)
            return "dead"
        if flight.cancelled:
            self._count("cancelled", message)
            self._open_door(key)
            return "cancelled"
        self.counters[{"nack": "nacked", "return": "returned", "defer": "deferred"}[verb]] += 1
        if verb == "nack" and self._is_exhausted(message):
            self._bury(key, message, token, failure)
            return "dead"
        if verb == "nack":
            message.failure = failure
        else:
            message.attempts -= 1
        if verb == "return":
            message.holds = True
            self._back(key, message)
        else:
            self._try_again(key, message, delay)
        return "ok"

    def extend(self, key: str, token: int, lease: int) -> str:
        if not self.holds(key, token):
            return "lost"
        self.flights[key].lease_end, self.flights[key].extended = self.now + lease, True
        return "cancelled" if self.flights[key].cancelled else "ok"

    def holds(self, key: str, token: int) -> bool:
        """Whether this token is that of the key's live delivery."""
        return key in self.flights and self.flights[key].token == token

    def _try_again(self, key: str, message: Message, delay: int) -> None:
        message.due, message.why, message.pinned, message.holds = self.now + delay, "retry", False, True
        self._back(key, message)

    def _back(self, key: str, message: Message) -> None:
        """A message comes back. A pending one of its key joins it, in the order in which they were triggered."""
        waiting = self.pending.get(key)
        if waiting is None:
            self.pending[key] = message
            return
        self.counters["folded"] += 1
        is_newer = (waiting.last, waiting.serial) < (message.last, message.serial)
        both = waiting.joined(message) if is_newer else message.joined(waiting)
        replaced = self.rules.replaces and not is_newer and message.attempts > 0
        if message.attempts and not is_newer:
            self._restart(message)
        # Its retry time stands, unless the other one's was named by its caller, or nothing of its payload is left.
        moved = replaced or waiting.pinned
        own, time = waiting if replaced else message, waiting if moved else message
        both.due, both.why, both.pinned = time.due, time.why, time.pinned
        both.attempts, both.earlier, both.failure = own.attempts, own.earlier, own.failure
        if self.rules.kept:
            held = sum(min(len(one.payloads), self.rules.kept) for one in (message, waiting))
            lost = max(0, held - self.rules.kept)
            both.dropped = message.dropped + waiting.dropped + lost
            self.counters["items_dropped"] += lost
        both.holds = not moved and any(one.holds and one.group == both.group for one in (message, waiting))
        self.pending[key] = both

    def _open_door(self, key: str) -> None:
        """A message ended, and its work is not done. One behind it has a window of its own."""
        if key not in self.pending:
            self.memo.pop(("door", key), None)

    def _bury(self, key: str, message: Message, number: int, reason: str) -> None:
        self._count("buried", message)
        self._open_door(key)
        self.dead.append(Letter(self._free_number(number), key, message, reason, self.now))
        self.buried = True

    def _free_number(self, number: int) -> int:
        taken = {letter.token for letter in self.dead}
        while number in taken:
            number -= 1
        return number

    def discard(self) -> None:
        """Keep the newest letters, once after all that a call buried; of one time, those it buried first."""
        if not self.buried:
            return
        self.buried = False
        self.dead.sort(key=lambda letter: (letter.died, letter.token))
        while self.dead[0].died <= self.now - self.rules.retention or len(self.dead) > self.rules.max_dead:
            self._count_of_letter("expired", self.dead.pop(0))

    def _count_of_letter(self, name: str, letter: Letter) -> None:
        self._count(name, letter.message)

    # -- changes ------------------------------------------------------------------------------------------------------

    def cancel(self, key: str) -> str:
        message, flight = self.pending.pop(key, None), self.flights.get(key)
        if message is not None:
            self._count("cancelled", message)
            self.memo.pop(("door", key), None)
        if flight is not None:
            flight.cancelled = True
            return "in_flight"
        return "absent" if message is None else "cancelled"

    def bury(self, key: str, reason: str) -> str:
        message = self.pending.pop(key, None)
        if message is None:
            return "in_flight" if key in self.flights else "absent"
        message.holds = False
        self.token = max(self.token + 1, self.now * 1000)
        self._bury(key, message, self.token, reason)
        self.discard()
        return "buried"

    def reschedule(self, key: str, at: int) -> str:
        if key not in self.pending:
            return "in_flight" if key in self.flights else "absent"
        self._pin(self.pending[key], at)
        return "rescheduled"

    def flush(self, key: str) -> int:
        message = self.pending.get(key)
        if message is None or message.due <= self.now:
            return 0
        message.due, message.why = self.now, "flush"
        return 1

    def flush_all(self) -> tuple[int, list[object]]:
        """(moved, left)"""
        return sum(self.flush(key) for key in self.pending), []

    def pause(self, paused: bool) -> bool:
        """Whether that changed anything."""
        before, self.paused = self.paused, paused
        return before != paused

    def exhume(self, verb: str, tokens: list[int]) -> tuple[int, int, int, int, int]:
        """(taken out, left, gone through, outdated, stayed)"""
        found, outdated, stayed, tokens = 0, 0, 0, tokens or [letter.token for letter in self.dead]
        for token in tokens:
            letter = next((letter for letter in self.dead if letter.token == token), None)
            if letter is None:
                continue
            newest = self._recall("version", letter.key)
            known = verb == "redrive" and None not in (newest, letter.message.version)
            is_old = known and letter.message.version < newest
            if verb == "redrive" and not is_old and not self._has_room(letter):
                stayed += 1
                continue
            found += 1
            self.dead.remove(letter)
            if is_old:
                self._count("deleted", letter.message)
                self.counters["outdated"] += 1
                outdated += 1
                continue
            self._count("redriven" if verb == "redrive" else "deleted", letter.message)
            if verb == "redrive":
                message = letter.message
                message.attempts, message.pinned, message.due, message.why = 0, False, self.now, "redrive"
                message.earlier = 0
                self._back(letter.key, message)
        return found, len(self.dead), len(tokens), outdated, stayed

    def _has_room(self, letter: Letter) -> bool:
        """Whether the pending message of the letter's key loses nothing when the letter joins it."""
        waiting, message = self.pending.get(letter.key), letter.message
        if waiting is None or not self.rules.kept:
            return True
        older = waiting if (waiting.last, waiting.serial) < (message.last, message.serial) else message
        return not older.dropped and len(waiting.payloads) + len(message.payloads) <= self.rules.kept

    def load(self, letter: Letter) -> str:
        """Store a letter that was there before."""
        number = min(letter.token, max(self.token, self.now * 1000))
        self.token = max(self.token, number)
        if any((one.token, one.key, one.died) == (number, letter.key, letter.died) for one in self.dead):
            return "present"
        if letter.died <= self.now - self.rules.retention:
            return "expired"
        if len(self.dead) >= self.rules.max_dead:
            return "full"
        self.counters["accepted"] += len(letter.message.payloads)
        message = replace(letter.message, serial=self.counters["accepted"], former=True)
        self.dead.append(Letter(self._free_number(number), letter.key, message, letter.reason, letter.died))
        self.dead.sort(key=lambda letter: (letter.died, letter.token))
        return "added"

    # -- what is to be seen -------------------------------------------------------------------------------------------

    def next_work(self) -> int:
        """When there is something to take or to put back: a message that may go, or is due later, or a lapsing lease.
        NEVER where only the end of a delivery, or a call, can change that."""
        leases = [flight.lease_end for flight in self.flights.values()]
        if self.paused or len(self.flights) >= (NEVER if self.rules.most is None else self.rules.most):
            return min(leases, default=NEVER)
        dues = [max(message.due, self.opens()) for message in self.unblocked()]
        return min(dues + leases, default=NEVER)

    def opens(self) -> int:
        """When the rate permits a delivery."""
        missing = max(0, (self.rules.interval or 0) - self._saved())
        return self.now + -(-missing // 1000)

    def unblocked(self) -> list[Message]:
        """What stands scheduled or ready, and not behind its group."""
        return [message for message in self._standing().values() if message.due > self.now or self._fits(message)]

    def behind(self) -> int:
        """How many of the messages due would stand behind their groups, if all that may go went."""
        ripe = list(self._ripe().values())
        groups = {message.group for message in ripe} - {""}
        blocked = 0
        for group in groups:
            room = max(0, self.rules.together - self._inside(group))
            blocked += max(0, sum(message.group == group and not message.holds for message in ripe) - room)
        return blocked

    def places(self) -> tuple[int, int, int, int, int]:
        """How many are due later, due now (blocked or not), behind a delivery of their key, in flight, dead."""
        standing, ripe = len(self._standing()), len(self._ripe())
        return standing - ripe, ripe, len(self.pending) - standing, len(self.flights), len(self.dead)

    def counted(self) -> dict[str, int]:
        return {name: n for name, n in self.counters.items() if n}

    def shown(self, message: Message | None) -> Any:
        if message is None:
            return None
        return (
            len(message.payloads), self.rules.merge(message.payloads), message.first, message.last, message.attempts,
            message.why, message.version, message.failure, message.priority or 0, message.group,
            message.dropped,
        )  # fmt: skip

    def peek(self, key: str) -> Any:
        flight, message = self.flights.get(key), self.pending.get(key)
        flying = flight and (self.shown(flight.message), flight.token, flight.lease_end)
        return self.shown(message), message and message.due, flying

    def letters(self) -> Any:
        return [(one.token, one.key, one.reason, one.died, self.shown(one.message)) for one in reversed(self.dead)]

    def unaccounted(self) -> int:
        """Accepted triggers that are nowhere: has to be 0, always."""
        gone = sum(self.counters[f"{end}_triggers"] for end in ("acked", "cancelled", "deleted", "expired"))
        return self.counters["accepted"] - gone - sum(len(message.payloads) for message in self._messages())
