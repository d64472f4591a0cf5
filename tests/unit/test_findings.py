"""Faults that an audit finds: each that is looked for is explained, and what mends it can be pasted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import idemgate
from idemgate.core.audit import check_lasting
from idemgate.core.findings import KINDS, Finding, Report, quoted
from idemgate.core.keys import PARTS
from idemgate.core.slotaudit import far_token

ROOT = Path(idemgate.__file__).parent


def _found() -> Iterator[list[str]]:
    """The texts with which each finding of the library is made."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).lower().endswith("finding"):
                yield [one.value for arg in node.args[:2] for one in ast.walk(arg) if _is_text(one)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value


def test_every_kind_that_is_found_is_explained_and_no_other() -> None:
    named = {word for words in _found() for word in words}
    assert {*KINDS} <= named
    assert {words[0] for words in _found() if words} <= {*KINDS}
    # What stands beside a kind is a part of a slot
    assert named - {*KINDS} <= {*PARTS, "WRONGTYPE"}


def test_what_mends_it_is_a_command() -> None:
    sources = [path.read_text() for path in (ROOT / "core").glob("*audit.py")]
    calls = [one for source in sources for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func) == "seen.finding" and len(one.args) > 3]
    words = {one.args[3].value for one in made if isinstance(one.args[3], ast.Constant)}
    assert words == {"HDEL", "HSET", "HSETNX", "PERSIST", "PEXPIRE", "ZREM"}


def test_what_breaks_a_promise_is_an_error_and_the_rest_a_warning() -> None:
    warnings = {"changing", "room", "forgotten-never", "foreign", "layout", "unread", "owner"}
    assert {name for name, kind in KINDS.items() if kind.severity != "error"} == warnings
    assert {kind.severity for kind in KINDS.values()} == {"error", "warning"}
    assert all(kind.cause and kind.mend for kind in KINDS.values())


def test_a_report_says_what_was_looked_at_and_what_breaks_a_promise() -> None:
    lapsed, owner = Finding("lease", "a", "no end", "DEL a"), Finding("owner", "b", "nobody")
    report = Report((lapsed, owner), {"slots": 1200})
    assert (report.sound, report.errors, report.by_kind) == (False, (lapsed,), {"lease": 1, "owner": 1})
    assert (lapsed.remedy, owner.remedy) == ("DEL a", KINDS["owner"].mend)
    assert lapsed.cause == KINDS["lease"].cause
    assert str(report) == ("looked at 1,200 slots: NOT sound\nerror lease: a: no end\nwarning owner: b: nobody")
    assert (Report(()).sound, str(Report(()))) == (True, "looked at nothing: sound")


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("ig1:{a.b_c-D@/9}:due", "ig1:{a.b_c-D@/9}:due"),
        ("", '""'),
        (b"a b", '"a b"'),
        ("~", '"~"'),
        (b"\x1f \x7e\x7f", r'"\x1f ~\x7f"'),
        ('\\"', r'"\x5c\x22"'),
        ("é", r'"\xc3\xa9"'),
    ],
)
def test_a_word_is_written_as_redis_cli_reads_it(word: bytes | str, written: str) -> None:
    assert quoted(word) == written


def test_a_key_that_goes_this_very_moment_goes() -> None:
    assert [one.kind for one in check_lasting(b"k", 0)] == ["expires"]
    assert [*check_lasting(b"k", -1)] == []


@pytest.mark.parametrize("token", [-1, 2**53])
def test_a_token_that_scripts_cannot_count_is_named(token: int) -> None:
    assert "scripts count exactly" in far_token(token, 10**15)
    assert far_token(10**15, 10**15) == ""
