"""Calls that accept triggers: check them, pack them, and split them by slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, Incomplete, head_with_keys, new_id, split_batches
from idemgate.core.durations import instant, milliseconds
from idemgate.core.keys import Key
from idemgate.errors import InvalidArgument
from idemgate.store.context import MAX_TRACE
from idemgate.topics.merge import pack
from idemgate.topics.messages import Receipt, ReceiptStatus, Ticket, Trigger
from idemgate.topics.slots import BaseCalls, SlotRequest, flatten, next_batch_size, restore_order, single

__all__ = ["MAX_TRIGGERS", "PackedTrigger", "TriggerCalls", "pack_time"]

PackedTrigger = tuple[bytes, bytes, bytes, bytes]
"""A checked trigger: its key, its options (`scripts/lib/trigger/accept_any.lua`), its accumulator and its route."""
MAX_TRIGGERS = 128
"""Maximum triggers per script call."""
MAX_DETAILED_TRIGGERS = 40
"""Maximum triggers per script call if some have options beyond a time. Those take two to four times as long."""
_SINGLE = b"%b$0\r\n\r\n$16\r\n%b\r\n$%d\r\n%b\r\n$0\r\n\r\n$%d\r\n%b\r\n$1\r\n1\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"
"""The framed form of one trigger, for the server clock and a 16-byte request id."""
_DETAILED = b"\x96"
"""The first byte of packed options that hold more than a time."""
_DEFERRED = 5
"""The reply code of a trigger that the script left for another call."""
_ACCEPTED: tuple[ReceiptStatus, ...] = ("scheduled", "merged", "replaced")
_MERGED_IN_PART: dict[int, ReceiptStatus] = {6: "merged", 7: "replaced"}
"""The reply codes of triggers some of whose items had no room."""
_NOT_ACCEPTED: dict[int, ReceiptStatus] = {3: "dropped", 4: "duplicate"}


class TriggerCalls(BaseCalls):
    """The calls that accept triggers."""

    __slots__ = ()

    def trigger(self, trigger: Trigger) -> Call[Receipt]:
        """Build the call for one trigger. Raises InvalidArgument."""
        return self._trigger(new_id(), self.pack_trigger(trigger))

    def _trigger(self, request: bytes, packed: PackedTrigger) -> Call[Receipt]:
        key, options, acc, route = packed
        slot = keys.slot_of(route, self.policy.slots)
        found = self._call(
            "trigger",
            slot,
            (request, self._rules, b"", options, b"1", key, acc),
            (lambda reply: self._read_receipts(slot, [packed], reply, reply[3:-1])[0]) if self._serials else _read_one,
            lambda calls, _: single(calls._trigger(request, packed)),
        )
        if self.clock is None:
            start = head_with_keys(found.script.sha, found.keys, 8)
            found.framed = _SINGLE % (
                start, request, len(self._rules), self._rules, len(options), options, len(key), key, len(acc), acc
            )  # fmt: skip
        return found

    def trigger_many(self, triggers: Iterable[Trigger]) -> Batch[list[Receipt]]:
        """Build the calls for many triggers. All triggers are checked before the first call is built.

        A script call takes the triggers of one slot: at most 128 KiB, and at most 128 of them. The limit is 40 if
        some have options beyond a time. Merging into large messages needs more calls.
        """
        return self.trigger_packed([self.pack_trigger(trigger) for trigger in triggers])

    def trigger_packed(self, triggers: list[PackedTrigger]) -> Batch[list[Receipt]]:
        """Build the calls for triggers that `pack_trigger` returned."""
        detailed = any(packed[1].startswith(_DETAILED) for packed in triggers)
        most = MAX_DETAILED_TRIGGERS if detailed else MAX_TRIGGERS
        if self.policy.slots == 1:
            return Batch(self._chain_batches(0, split_batches(triggers, _size, most)), flatten)
        by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for position, packed in enumerate(triggers):
            by_slot[self.slot_of(packed[3])].append(position)
        sizes = list(map(_size, triggers))
        placed = {slot: split_batches(positions, sizes.__getitem__, most) for slot, positions in by_slot.items()}
        calls = [
            request
            for slot, batches in placed.items()
            for request in self._chain_batches(slot, [[triggers[i] for i in batch] for batch in batches])
        ]
        return Batch(calls, lambda answers: restore_order(flatten(placed.values()), answers))

    def _chain_batches(self, slot: int, batches: Iterable[Sequence[PackedTrigger]]) -> list[Call[list[Receipt]]]:
        """Build one call per batch. Each call names the preceding request.

        The script does nothing while the preceding request is incomplete. This keeps the order of triggers per key.
        """
        calls, before = list[Call[list[Receipt]]](), b""
        for batch in batches:
            request = SlotRequest(new_id(), batch)
            calls.append(self._trigger_batch(slot, request, before))
            before = request.id
        return calls

    def _trigger_batch(
        self, slot: int, request: SlotRequest[PackedTrigger], before: bytes = b""
    ) -> Call[list[Receipt]]:
        keys, options, accs, _ = zip(*request.entries, strict=True)
        distinct = b"1" if len(set(keys)) == len(keys) else b""
        args: tuple[Arg, ...] = (request.id, self._rules, before, _pack_all(options), distinct, *keys, *accs)
        return self._call(
            "trigger",
            slot,
            args,
            lambda reply: self._read_receipts(
                slot, request.entries, reply, request.select_answers(_expand(reply[2 + self._serials :]))
            ),
            lambda calls, _: request.split(
                lambda packed: calls.slot_of(packed[3]), calls._trigger_batch, restore_order
            ),
        )

    def _read_receipts(
        self, slot: int, triggers: Sequence[PackedTrigger], reply: list[Any], codes: list[int]
    ) -> list[Receipt]:
        done = codes.index(_DEFERRED) if _DEFERRED in codes[-1:] else len(codes)
        receipts = _read_codes(reply[1], codes[:done])
        if self._serials:
            for receipt, (key, _, _, route) in zip(receipts, triggers, strict=False):
                receipt.ticket = Ticket(self.name, key, route, reply[1], self.policy.slots, reply[2])
        if done == len(codes):
            return receipts
        rest = split_batches(list(triggers[done:]), _size, next_batch_size(done))
        calls = [self._trigger_batch(slot, SlotRequest(new_id(), batch)) for batch in rest]
        raise Incomplete(Batch(calls, lambda answers: receipts + flatten(answers)))

    def pack_trigger(self, trigger: Trigger) -> PackedTrigger:
        """Check a trigger and pack it for the script. Raises InvalidArgument, which names the key."""
        try:
            key, group, options = keys.raw(trigger.key), trigger.group, pack_time(trigger)
            if not (trigger.priority is group is trigger.version is trigger.event_id is None) or trigger.trace:
                options = self._pack_options(trigger, options)
            acc = self.policy.merge.lift(trigger.payload, self.codec)
            if self.check is not None:
                self.check(self.policy.merge, acc, trigger.payload)
            return key, options, acc, key if group is None else keys.raw(group)
        except InvalidArgument as error:
            error.name_subject(self.name, trigger.key)
            raise

    def _pack_options(self, trigger: Trigger, time: bytes) -> bytes:
        """Return all options of a trigger in the format of `scripts/lib/trigger/accept_any.lua`."""
        version = b"" if trigger.version is None else _pack_version(trigger.version)
        group = b"" if trigger.group is None else _pack_group(trigger.group)
        key = keys.raw(trigger.key)
        event = b"" if trigger.event_id is None else keys.event(trigger.event_id, key, group or key)
        return pack([time, self._check_priority(trigger.priority), group, version, event, _check_trace(trigger.trace)])

    def _check_priority(self, priority: int | None) -> int | bytes:
        if priority is None:
            return b""
        boost = self.policy.priority_boost or 1
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) * boost > 2**52:
            raise InvalidArgument(
                "priority", priority, "not an integer that ranks exactly", f"Use at most 2**52 / {boost} ms"
            )
        if not self.policy.priority:
            raise InvalidArgument("priority", priority, f"topic {self.name!r} has none", "Make it with priority=True")
        return priority


def _read_one(reply: list[Any]) -> Receipt:
    return _read_codes(reply[1], reply[2:3])[0]


def _read_codes(now_ms: int, codes: list[int]) -> list[Receipt]:
    try:
        return [
            Receipt(_NOT_ACCEPTED[code], None)
            if code in _NOT_ACCEPTED
            else Receipt(_ACCEPTED[code & 7], now_ms + (code >> 3))
            for code in codes
        ]
    except IndexError:  # some were merged in part; the usual path does not look for them
        return [_read_any_code(now_ms, code) for code in codes]


def _read_any_code(now_ms: int, code: int) -> Receipt:
    status = _MERGED_IN_PART.get(code & 7)
    if status is None:
        return _read_codes(now_ms, [code])[0]
    return Receipt(status, now_ms + (code >> 3), items_dropped=True)


def _expand(runs: list[int]) -> list[int]:
    """Return the code of each trigger. Neighbours with the same code share a pair (code, number of them)."""
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    if sum(n for _, n in pairs) > MAX_TRIGGERS:
        raise ValueError("more answers than triggers")
    return [code for code, n in pairs for _ in range(n)]


def _pack_all(options: Sequence[bytes]) -> bytes:
    """Return the options of the triggers of one call: those of all if they are the same, else a packed array."""
    if options.count(options[0]) == len(options):
        return options[0]
    detailed = any(one.startswith(_DETAILED) for one in options)
    start = b"\xdd" + len(options).to_bytes(4) if detailed else b"\xdc" + len(options).to_bytes(2)
    return start + b"".join(one if one.startswith(_DETAILED) else pack(one) for one in options)


def _size(packed: PackedTrigger) -> int:
    return sum(map(len, packed))  # the route repeats the key or the group: both are stored twice


def _pack_group(group: Key) -> bytes:
    raw_group = keys.raw(group)
    if b"\0" in raw_group:
        raise InvalidArgument("group", group, "holds a NUL", "Use a text without one")
    return raw_group


def _check_trace(trace: bytes) -> bytes:
    if type(trace) is not bytes or len(trace) > MAX_TRACE:
        raise InvalidArgument("trace", trace, "no trace of a tracer", f"Pass at most {MAX_TRACE} bytes, or none")
    return trace


def _pack_version(version: int) -> bytes:
    if not isinstance(version, int) or isinstance(version, bool) or abs(version) > 2**53:
        raise InvalidArgument(
            "version", version, "not an integer up to 2**53", "Use a revision number, or a time in ms"
        )
    return b"%d" % version


def pack_time(trigger: Trigger) -> bytes:
    """Return the packed `at` or `delay` of a trigger; empty if it has neither. Raises InvalidArgument."""
    if trigger.delay is not None and trigger.at is not None:
        raise InvalidArgument("delay", trigger.delay, "at= was given too", "Pass one of delay and at")
    if trigger.at is not None:
        return b"a%d" % instant(trigger.at, "at")
    if trigger.delay is not None:
        return b"d%d" % milliseconds(trigger.delay, "delay", zero=True)
    return b""
