"""Results of deliveries: how they are encoded, found and read by callers that wait for them."""

from __future__ import annotations

from typing import Any

from idemgate.core.clock import monotonic
from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.codec.storable import describe_unstored
from idemgate.core.durations import Duration, milliseconds
from idemgate.errors import DecodeError, DeliveryFailed, InvalidArgument, NoResult, ResultTimeout
from idemgate.guard.current import waits_for_own_delivery
from idemgate.store.context import Context
from idemgate.topics.messages import Receipt, Ticket
from idemgate.topics.policy import Policy

__all__ = ["NONE_RESULT", "ResultWait", "encode_result", "find_result"]

_POLL = 5.0
"""Seconds after which a waiter reads again without a wake-up, which may be lost with a connection."""
NONE_RESULT = b"v" + Codec().encode(None)
"""The result of a handler that returned None."""


def encode_result(codec: Codec, value: object) -> bytes:
    """Encode what a handler returned. A value that cannot be stored is replaced by the reason."""
    try:
        return b"v" + codec.encode(value, "result")
    except InvalidArgument as error:
        return b"n" + describe_unstored(error)[:500].encode(errors="replace")


def find_result(reply: list[Any], ticket: Ticket, slots: int) -> bytes | None:
    """Return the result of the delivery that carried a trigger, or None if there is none.

    A dead letter may be redriven, merge with other triggers and end again. So the newest result counts that covers the
    trigger, or whose message holds the first and the last trigger of such a dead letter, by their times. Limit: a
    message whose first trigger came in the same millisecond as that of a dead letter of its key looks the same.

    Args:
        reply: the reply of `topics/scripts/results.lua`.
        ticket: the trigger.
        slots: the current number of slots. Serials of another number cannot be compared, so only the times decide.

    Raises:
        DecodeError: stored bytes are corrupt.
    """
    with wrap_decode_errors("a stored result"):
        found, died = None, None
        for packed in (reply[3], reply[2]):
            results: list[tuple[int, int, int, int, Any]] = unpack(packed, "a stored result") if packed else []
            for floor, serial, first, last, result in results:
                if not isinstance(result, bytes):
                    raise TypeError(f"{result!r:.100} is no result")
                covers = slots != ticket.slots or floor <= ticket.serial < serial
                redriven = died is not None and first <= died[0] and (last, serial) >= died[1:]
                if redriven or (covers and first <= ticket.accepted_ms <= last):
                    found, died = result, (first, last, serial) if result[:1] == b"d" else None
    return found


class ResultWait:
    """One wait of a caller for the result of its trigger.

    Raises:
        InvalidArgument: `receipt` is no receipt of this topic, the topic stores no results, or the timeout is invalid.
        NoResult: the trigger was not accepted.
    """

    __slots__ = ("_deadline", "_seconds", "_topic", "ticket")

    def __init__(self, topic: str, policy: Policy, receipt: Receipt, timeout: Duration) -> None:
        if not isinstance(receipt, Receipt):
            raise InvalidArgument("receipt", receipt, "not a receipt", "Pass what trigger() returned")
        if receipt.ticket is not None and receipt.ticket.topic != topic:
            problem = f"a receipt of topic {receipt.ticket.topic!r}, not of {topic!r}"
            raise InvalidArgument("receipt", receipt, problem, "Pass it to `result` of its topic")
        if receipt.ticket is None or policy.result_retention is None:
            fix = 'Declare the topic with result_retention="10m"'
            raise InvalidArgument("receipt", receipt, f"topic {topic!r} stores no results", fix)
        self.ticket: Ticket = receipt.ticket
        self._topic = topic
        self._seconds = milliseconds(timeout, "timeout", zero=True) / 1000
        self._deadline = monotonic() + self._seconds
        if not receipt.accepted:
            raise NoResult(topic, self._key, f"the trigger was not accepted ({receipt.status})")

    @property
    def _key(self) -> str:
        return self.ticket.key.decode(errors="backslashreplace")

    def check_other_delivery(self, context: Context) -> None:
        """Raise InvalidArgument if the caller is part of the delivery of this key, so that the wait could not end."""
        if self._seconds and waits_for_own_delivery(context, self._topic, self.ticket.key):
            raise InvalidArgument(
                "receipt",
                self._key,
                f"the handler of topic {self._topic!r} would wait for the end of its own delivery",
                "Wait outside of the handler, or pass timeout=0 to look",
            )

    def check_deadline(self) -> None:
        """Raise ResultTimeout if the wait is over."""
        if monotonic() >= self._deadline:
            raise ResultTimeout(self._topic, self._key, self._seconds)

    @property
    def next_poll(self) -> float:
        """The seconds to wait for a wake-up before the next read."""
        return max(0.0, min(self._deadline - monotonic(), _POLL))

    def decode(self, codec: Codec, result: bytes) -> Any:
        """Return the value of a result.

        Raises:
            DeliveryFailed: the message became a dead letter.
            NoResult: the message was cancelled, or the value was not stored.
            DecodeError: stored bytes are corrupt.
        """
        kind, text = result[:1], result[1:].decode(errors="replace")
        if kind == b"v":
            return codec.decode(result[1:])
        if kind == b"d":
            raise DeliveryFailed(self._topic, self._key, text)
        if kind == b"c":
            raise NoResult(self._topic, self._key, "it was cancelled")
        if kind == b"n":
            raise NoResult(self._topic, self._key, f"its value was not stored: {text}")
        raise DecodeError(f"a result begins with {kind!r}, which this version does not know")
