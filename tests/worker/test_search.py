"""No interleaving of a guarded handler, its guard and its topic breaks a promise, and the search finds each fault that
is put into the scripts.

`IDEMGATE_DEPTH=13 pytest tests/worker/test_search.py -s` looks further.
"""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from tests.exhaustive import choose_depth
from tests.faults import broken
from tests.worker.search import Search, Violation

DEPTH = choose_depth(7, 8, 12)  # one more takes about twice as long


@pytest.mark.timeout(7200)
@DEPTH
def test_no_interleaving_breaks_a_promise(raw: Any, gate: Gate, depth: int, record_fault: Any) -> None:
    states = Search(raw, gate, {}).run(depth)
    print(f"{states:,} states within {depth} steps")
    assert states > 500
    record_fault(
        "every order of steps of workers whose handler is guarded, with late copies (N: states)",
        states,
        promises="P1 P4 P5 P6 P7 P11 P12",
        exhaustive=True,
        steps=f"{depth}",
    )


FAULTS = [
    ("guard/claim", "what is done is free"),
    ("guard/claim", "a claim does not look at the lease"),
    ("guard/claim", "a claim does not know its copies"),
    ("guard/claim", "tokens stand still"),
    ("guard/complete", "what is done is kept for no time"),
    ("guard/release", "anybody gives back"),
    ("guard/release", "what is given back is done"),
    ("topics/take", "what lapses has another name"),
    ("topics/take", "what was joined keeps its name"),
    ("topics/settle", "what is put off has another name"),
    ("topics/settle", "what is put off was tried"),
    ("topics/settle", "an ending needs no token"),
    ("topics/take", "what lapses is lost"),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
@pytest.mark.slow
def test_a_fault_in_a_script_is_found(raw: Any, gate: Gate, name: str, fault: str) -> None:
    with pytest.raises(Violation) as found:
        Search(raw, gate, {name: broken(name, fault)}).run(11)
    print(found.value)
    Search(raw, gate, {}).follow(found.value.path)  # as it is, the script breaks nothing there
