"""No interleaving of a small scope breaks a promise, and the search finds each fault that is put into the scripts.

`IDEMGATE_DEPTH=10 pytest tests/topics/test_search.py -s` looks further.
"""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from tests.exhaustive import choose_depth
from tests.faults import broken
from tests.topics.search import SCOPES, Search, Violation

pytestmark = pytest.mark.one_in(3)

DEPTH = choose_depth(6, 7, 9)  # one more takes about three times as long


@pytest.mark.timeout(7200)
@DEPTH
@pytest.mark.parametrize("scope", SCOPES)
def test_no_interleaving_breaks_a_promise(raw: Any, gate: Gate, scope: str, depth: int, record_fault: Any) -> None:
    states = Search(raw, gate, SCOPES[scope], {}).run(depth)
    print(f"{scope}: {states:,} states within {depth} steps")
    assert states > 400
    record_fault(
        "every order of steps of a topic, with late copies (N: states)",
        states,
        promises="P4 P5 P6 P7 P9 P10 P11 P13 P15",
        exhaustive=True,
        steps=f"{depth}",
    )


@DEPTH
def test_no_interleaving_breaks_a_promise_in_a_crowded_millisecond(raw: Any, gate: Gate, depth: int) -> None:
    # Given a script that takes two messages of a millisecond for more than it can order
    crowded = {"topics/take": broken("topics/take", "two of a millisecond are more than can be ordered")}
    # Then no order of steps breaks a promise
    assert Search(raw, gate, SCOPES["one group"], crowded).run(depth) > 400


FAULTS = [
    ("one key", "topics/settle", "an ending needs no token"),
    ("one key", "topics/settle", "a plain ack needs no token"),
    ("one key", "topics/trigger", "a key in flight is scheduled"),
    ("one key", "topics/take", "a take is not remembered"),
    ("one key", "topics/trigger", "a trigger is not remembered"),
    ("one key", "topics/settle", "what is behind is forgotten"),
    ("one key", "topics/settle", "what was cancelled is tried again"),
    ("one key", "topics/settle", "attempts of a message are not counted"),
    ("one key", "topics/take", "what lapses is lost"),
    ("one key", "topics/take", "tokens of deliveries do not rise"),
    ("one key", "topics/cancel", "what is cancelled stays scheduled"),
    ("one key", "topics/take", "leases lapse at once"),
    ("one key", "topics/take_dead", "a letter stays"),
    ("one key", "topics/take", "a lease ends where it starts"),
    ("one group", "topics/cancel", "what is buried by its key is gone"),
    ("one group", "topics/take", "a group is never full"),
    ("one group", "topics/take", "a delivery of a group is stored as a plain one"),
    ("one group", "topics/settle", "an ending keeps its group"),
    ("lost replies", "topics/take", "what was not heard of is not taken again"),
    ("lost replies", "topics/settle", "what was not heard of ends twice"),
    ("turns", "topics/settle_and_take", "a turn ends anew what it ended"),
    ("turns", "topics/settle_and_take", "a copy of a turn takes more"),
    ("turns", "topics/settle_and_take", "an ending needs no token"),
    ("turns", "topics/settle_and_take", "an ending keeps its group"),
    ("dead letters", "topics/settle", "what is buried is tried again"),
    ("dead letters", "topics/cancel", "what is cancelled stays scheduled"),
    ("dead letters", "topics/cancel", "what is buried by its key is gone"),
    ("dead letters", "topics/cancel", "what runs is cancelled with what is buried"),
    ("dead letters", "topics/take_dead", "what is redriven is at its end"),
    ("dead letters", "topics/take_dead", "a letter stays"),
    ("dead letters", "topics/take_dead", "what is deleted is not counted"),
    ("dead letters", "topics/take_dead", "what was asked before is not known"),
    ("times", "topics/settle", "what is given back was tried"),
    ("times", "topics/extend", "anybody extends"),
    ("times", "topics/extend", "a heartbeat holds nothing"),
    ("times", "topics/extend", "an extended lease forgets its token"),
    ("times", "topics/reschedule", "another time is not gone by"),
    ("times", "topics/reschedule", "another time is not a caller's"),
    ("times", "topics/reschedule", "what was asked before is not known"),
    ("times", "topics/cancel", "what is cancelled in flight goes on"),
]


@pytest.mark.parametrize(("scope", "name", "fault"), FAULTS)
@pytest.mark.slow
def test_a_fault_in_a_script_is_found(raw: Any, gate: Gate, scope: str, name: str, fault: str) -> None:
    with pytest.raises(Violation) as found:
        Search(raw, gate, SCOPES[scope], {name: broken(name, fault)}).run(9)
    print(found.value)
    Search(raw, gate, SCOPES[scope], {}).follow(found.value.path)  # as it is, the script breaks nothing there
