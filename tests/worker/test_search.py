"""No interleaving of a guarded handler, its guard and its topic breaks a promise, and the search finds each fault that
is put into the scripts.

`IDEMGATE_DEPTH=13 pytest tests/worker/test_search.py -s` looks further.
"""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from tests.exhaustive import broken, choose_depth
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


FAULTS: dict[str, tuple[str, str, str]] = {
    "what is done is free": ("guard/claim", 'if kind ~= "" then', 'if state == "f" then'),
    "a claim does not look at the lease": ("guard/claim", "if left > 0 then", "if left > 1e15 then"),
    "a claim does not know its copies": ("guard/claim", "if owner == token and", "if false and"),
    "tokens do not rise": ("guard/claim", "fence(last, now_us)", "1"),
    "what is done is kept for no time": ("guard/complete", "now_ms + span, now_ms", "now_ms + 1, now_ms"),
    "anybody gives back": ("guard/release", 'state == "p" and owner == ARGV[at]', 'state == "p"'),
    "what is given back is done": ("guard/release", 'pack_record("r", ""', 'pack_record("d", "n"'),
    "what lapses has another name": (
        "topics/take", 'add_count("folded", requeue(K,', 'm.serial = m.serial + 1; add_count("folded", requeue(K,'),
    "what was joined keeps its name": (
        "topics/take", "old.count = old.count + new.count", "new.last, new.serial = old.last, old.serial"),
    "what is put off has another name": (
        "topics/settle", "    m.pinned = 0\n", "    m.pinned, m.last = 0, m.last + 1\n"),
    "what is put off was tried": ("topics/settle", "    m.pinned = 0\n", "    m.attempts = m.attempts + 1\n"),
    "an ending needs no token": (
        "topics/settle", "elseif not entry or (d and d.token or entry) ~= tokens[i] then", "elseif not entry then"),
    "what lapses is lost": (
        "topics/take",
        'add_count("folded", requeue(K, p, key, m, retry_time(key, entry.token, m), reason.retry))', ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_a_fault_in_a_script_is_found(raw: Any, gate: Gate, fault: str) -> None:
    name, before, after = FAULTS[fault]
    with pytest.raises(Violation) as found:
        Search(raw, gate, broken(name, {before: after})).run(11)
    print(found.value)
    Search(raw, gate, {}).follow(found.value.path)  # as it is, the script breaks nothing there
