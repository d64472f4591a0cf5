"""Assertions about one key, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from idemgate.core.keys import Key

if TYPE_CHECKING:
    from idemgate.gate import Gate
    from idemgate.topics.topic import Topic

__all__ = ["assert_merged", "assert_ran_once"]


def assert_ran_once(gate: Gate, key: Key, *, scope: str = "claim") -> None:
    """Assert that the work of a key is done and was started once. One round trip; it blocks.

    Of a guarded function these are `assert_ran_once(gate, charge.key(order), scope=charge.scope)`. A run that raised
    counts, also if it released the key. A run of `gate.first`, or with `at_most_once`, counts when it starts.

    Raises:
        AssertionError: It is not done, or was started more often. The text shows the stored record.
    """
    record = gate.inspect(key, scope=scope)
    if record.state == "done" and record.attempts <= 1:
        return
    if record.state == "absent":
        others = ", ".join(map(repr, record.other_scopes))
        problem = f"was never run; it has a record in {others}: pass scope=" if others else "was never run"
    elif record.state != "done":
        problem = f"is not done but {record.state}"
    else:
        problem = f"was started {record.attempts} times"
    raise AssertionError(f"key {key!r} of scope {scope!r} {problem}: {record}")


def assert_merged(topic: Topic[Any, Any], key: Key, *, triggers: int) -> None:
    """Assert that the pending message of a key has merged this many triggers. One round trip; it blocks.

    Call it before `drain`, which delivers the message.

    Raises:
        AssertionError: The message has merged another number of them, or there is none.
    """
    pending = topic.peek(key).pending
    found = 0 if pending is None else pending.count
    if found != triggers:
        shown = "no message is pending; it was delivered, or never triggered" if pending is None else repr(pending)
        raise AssertionError(f"topic {topic.name!r}, key {key!r}: {found} triggers are merged, not {triggers}: {shown}")
