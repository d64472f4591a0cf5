"""The faults that tests put into the scripts can be put there. Most of these tests are slow."""

from __future__ import annotations

import re

import pytest

from idemgate import lua
from tests.faults import FAULTS, Fault, broken
from tests.for_each import for_each
from tests.guard import test_search as guard
from tests.resilience import linear
from tests.topics import test_search as topics
from tests.worker import test_search as worker

USED = sorted(
    {(name, fault) for one in (guard, topics, worker) for *_, name, fault in one.FAULTS}
    | {*linear.SPOILT, *linear.PLAIN_SPOILT, ("topics/take", "two of a millisecond are more than can be ordered")}
    | {(name, fault) for _, name, fault in guard.PLAIN_FAULTS}
    | {("guard/claim", "records of plain commands are unknown")}
    | {("guard/complete", "the long form says all"), ("topics/settle", "there is another counter")}
)


@for_each(("name", "fault"), USED)
def test_a_fault_changes_its_script(name: str, fault: str) -> None:
    assert broken(name, fault) != lua.expand(name)


def test_each_fault_is_used_and_each_marker_stands_once() -> None:
    assert {fault for _, fault in USED} == {*FAULTS}
    texts = [lua.source(name) for name in (*lua.names(), *lua.libraries())]
    markers = [marker for text in texts for marker in re.findall(r" -- fault: (.+)", text)]
    assert sorted(markers) == sorted({one.marker for one in FAULTS.values()})


def test_no_server_gets_a_marker() -> None:
    for name in lua.names():
        assert b"fault:" not in lua.script(name).text


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("if a then b() end", "never"),
        ("return nil", "nothing"),
        ("x = a + a", "a => b"),
        ("x = ab", "a => b"),
        ("x = a", "a => a"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(line: str, change: str) -> None:
    with pytest.raises(ValueError, match="fits"):
        Fault("here", change).applied(line)


def test_a_marker_that_is_missing_or_stands_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="0 lines have the marker claim-copy"):
        broken("guard/renew", "a claim does not know its copies")
    twice = lua.expand("guard/claim").replace("hold, wait\n", "hold, wait\nif span then -- fault: claim-copy\nend\n")
    monkeypatch.setattr(lua, "expand", lambda name: twice)
    with pytest.raises(ValueError, match="2 lines have"):
        broken("guard/claim", "a claim does not know its copies")
