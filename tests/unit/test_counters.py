"""What a process counts, and what it calls itself."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from idemgate.core.calls import new_id
from idemgate.core.counters import Counters


def test_counters_count() -> None:
    counters = Counters()
    assert counters["never"] == 0
    assert counters.snapshot() == {}
    assert repr(counters) == "Counters({})"
    counters.add("a")
    counters.add("a", 2)
    counters.add("b")
    # Given a snapshot, When counting goes on, Then it stays as it was
    snapshot = counters.snapshot()
    counters.add("a")
    assert (snapshot, counters["a"]) == ({"a": 3, "b": 1}, 4)


def test_counters_are_read_as_a_mapping_is() -> None:
    counters = Counters()
    counters.add_each("a", "b", "a")
    assert dict(counters) == {**counters} == {"a": 2, "b": 1}
    assert (list(counters), list(counters.keys()), len(counters)) == (["a", "b"], ["a", "b"], 2)
    assert "a" in counters
    assert "never" not in counters
    # Given one who reads, When new names are counted meanwhile, Then that does not disturb
    for name in counters:
        counters.add(f"{name}{name}")
    assert len(counters) == 4


def _together(work: object, threads: int = 8) -> None:
    began = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=work) for _ in range(threads)]  # type: ignore[arg-type]
        for one in running:
            one.start()
        for one in running:
            one.join()
    finally:
        sys.setswitchinterval(began)


def test_threads_lose_no_count() -> None:
    counters = Counters()

    def work() -> None:
        for _ in range(3000):
            counters.add("a")

    _together(work)
    assert counters["a"] == 24_000


def test_tokens_are_unique_in_all_threads() -> None:
    found: list[bytes] = []

    def work() -> None:
        found.extend([new_id() for _ in range(3000)])

    _together(work)
    assert len(set(found)) == len(found) == 24_000
    assert {len(one) for one in found} == {16}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_tokens_of_its_own() -> None:
    before = new_id()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"".join(new_id() for _ in range(100)))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        theirs = pipe.read()
    # Then no token of the child's begins as ours do
    assert len(theirs) == 1600
    assert {theirs[at : at + 10] for at in range(0, 1600, 16)}.isdisjoint({before[:10]})
    assert new_id()[:10] == before[:10]
