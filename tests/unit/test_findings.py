"""Faults that an audit finds: each that is looked for is explained, and what mends it can be pasted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest

import idemgate
from idemgate.audit.catalogue import CATALOGUE, DATA_KINDS, RUNNING_KINDS, SERVER_KINDS, link_of
from idemgate.audit.findings import Finding, Report, quote_argument
from idemgate.audit.keys import (
    check_members,
    check_page,
    check_persistent,
    check_record,
    check_reshard_mark,
    check_slot_counts,
    parse_slot_counts,
)
from idemgate.audit.slot import (
    AHEAD_US,
    Contents,
    Slot,
    SlotTooLarge,
    SlotView,
    TopicEntry,
    balance,
    check_slot,
    decode_topic_entry,
    format_time,
    read_slot,
    token_problem,
)
from idemgate.core.codec import Codec
from idemgate.core.keys import PARTS, slot_of
from idemgate.errors import DecodeError
from idemgate.topics.merge import merge_of
from tests.for_each import for_each
from tests.messages import pack_message

ROOT = Path(idemgate.__file__).parent
NOW = 1_700_000_000_000


def _found() -> Iterator[list[str]]:
    """The texts with which each finding of the library is made."""
    for source in filter(lambda text: "inding(" in text, map(Path.read_text, ROOT.rglob("*.py"))):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).lower().endswith("finding"):
                yield [one.value for arg in node.args[:2] for one in ast.walk(arg) if _is_text(one)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value


def test_every_kind_that_is_found_is_explained_and_no_other() -> None:
    named = {word for words in _found() for word in words}
    assert {*DATA_KINDS} <= named
    assert {words[0] for words in _found() if words and words[0]} <= {*CATALOGUE}
    # What stands beside a kind is a part of a slot
    assert named - {*CATALOGUE} <= {*PARTS, "WRONGTYPE", ""}


def test_what_mends_it_is_a_command() -> None:
    sources = [path.read_text() for path in [ROOT / "audit/keys.py", *(ROOT / "audit/slot").glob("*.py")]]
    calls = [one for source in sources for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func) == "view.finding" and len(one.args) > 3]
    words = {one.args[3].value for one in made if isinstance(one.args[3], ast.Constant)}
    assert words == {"HDEL", "HSET", "HSETNX", "PERSIST", "PEXPIRE", "ZADD", "ZREM"}


def test_what_breaks_a_promise_is_critical_and_the_rest_a_warning() -> None:
    warnings = {"changing", "room", "forgotten-never", "foreign", "layout", "unread", "owner"}
    assert {name for name, kind in DATA_KINDS.items() if kind.severity != "critical"} == warnings
    assert {kind.severity for kind in DATA_KINDS.values()} == {"critical", "warning"}
    assert all(kind.cause and kind.mend for kind in CATALOGUE.values())


def test_each_check_of_the_doctor_is_in_the_catalogue_and_no_other() -> None:
    sources = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    names = {*re.findall(r'Check\(\s*"([a-z]+)"', sources), *re.findall(r'_unless_away\("([a-z]+)"', sources)}
    assert names == {*SERVER_KINDS}


def test_no_two_kinds_have_one_name() -> None:
    assert len(CATALOGUE) == len(DATA_KINDS) + len(SERVER_KINDS) + len(RUNNING_KINDS)


def test_the_page_of_a_kind_explains_it_with_its_threshold() -> None:
    page = (ROOT.parent / "docs" / "findings.md").read_text()
    sections = dict(re.findall(r"^## ([a-z-]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert [*sections] == [*RUNNING_KINDS]
    for name, kind in RUNNING_KINDS.items():
        assert sections[name].startswith(f"\n*{kind.severity}*"), name
        assert not kind.threshold or f"{kind.threshold:g}" in sections[name], name
        assert "mend" in sections[name].lower(), name
    for name in CATALOGUE:
        path, _, anchor = link_of(name).partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT.parent / path).read_text(), re.MULTILINE)
        assert anchor in [heading.lower().replace(" ", "-") for heading in headings], name


def test_a_report_says_what_was_looked_at_and_what_breaks_a_promise() -> None:
    lapsed, owner = Finding("lease", "a", "no end", "DEL a"), Finding("owner", "b", "nobody")
    report = Report((lapsed, owner), {"slots": 1200})
    assert (report.sound, report.critical, report.by_kind) == (False, (lapsed,), {"lease": 1, "owner": 1})
    assert (lapsed.remedy, owner.remedy) == ("DEL a", DATA_KINDS["owner"].mend)
    assert lapsed.cause == DATA_KINDS["lease"].cause
    assert str(report) == ("looked at 1,200 slots: NOT sound\ncritical lease: a: no end\nwarning owner: b: nobody")
    assert (Report(()).sound, str(Report(()))) == (True, "looked at nothing: sound")


@for_each(
    ("word", "written"),
    [
        ("ig2:{a.b_c-D@/9}:scheduled", "ig2:{a.b_c-D@/9}:scheduled"),
        ("", '""'),
        (b"a b", '"a b"'),
        ("X Y", '"X Y"'),
        ("~", '"~"'),
        (b"\x1f \x7e\x7f", r'"\x1f ~\x7f"'),
        ('\\"', r'"\x5c\x22"'),
        ("é", r'"\xc3\xa9"'),
    ],
)
def test_a_word_is_written_as_redis_cli_reads_it(word: bytes | str, written: str) -> None:
    assert quote_argument(word) == written


def test_a_moment_that_no_calendar_has_is_shown_as_its_number() -> None:
    assert format_time(1_700_000_000_123) == "2023-11-14 22:13:20.123Z"
    assert format_time(1e300) == "1e+300"


def test_a_rate_lets_a_slot_rest_for_its_burst_and_one_more() -> None:
    facts = {"slots": 4, "merge": {"op": "last"}, "rate": "1/60", "burst": 9}
    expected = TopicEntry(4, 1, merge_of("last"), False, 10 * 4 * 60_000_000)
    assert decode_topic_entry(msgpack.packb(facts), False) == expected


def test_a_key_that_goes_this_very_moment_goes() -> None:
    assert [one.kind for one in check_persistent(b"k", 0)] == ["expires"]
    assert [*check_persistent(b"k", -1)] == []


@pytest.mark.parametrize("token", [-1, 2**53])
def test_a_token_that_scripts_cannot_count_is_named(token: int) -> None:
    assert "scripts count exactly" in token_problem(token, 10**15)
    assert token_problem(10**15, 10**15) == ""


def test_a_token_may_be_a_day_ahead_of_the_clock() -> None:
    assert token_problem(10**15 + AHEAD_US, 10**15) == ""
    assert "more than a day ahead" in token_problem(10**15 + AHEAD_US + 1, 10**15)


# -- what is beside slots ---------------------------------------------------------------------------------------------


def test_what_never_ends_is_told_and_what_ends_at_once_is_not() -> None:
    page = msgpack.packb([1, 2, 3, 4, 5])
    assert [*check_page(b"k", 0, page)] == []
    assert [(one.kind, one.mend) for one in check_page(b"k", -1, page)] == [("no-expiry", "PEXPIRE k 86400000")]
    for code, what in ((b"r", "it has no expiry"), (b"v", "it has no expiry: its key is never free again")):
        record = b"\xc1" + code + bytes(36) + b"\x01\xc0"
        assert [*check_record(b"k", 0, record, NOW * 1000, Codec())] == []
        assert [one.what for one in check_record(b"k", -1, record, NOW * 1000, Codec())] == [what]


@pytest.mark.parametrize(
    ("change", "what", "mend"),
    [
        (
            b"0 abc",
            "topic 't' is being deleted; its closed slots accept no calls until that ends",
            "idemgate topic delete t",
        ),
        (
            b"4 abc",
            "topic 't' is being changed to 4 slots; its closed slots accept no calls until that ends",
            "idemgate topic reshard t 4",
        ),
    ],
)
def test_a_change_that_was_cut_off_is_told_with_what_ends_it(change: bytes, what: str, mend: str) -> None:
    (found,) = check_reshard_mark(b"r", "t", change, {"t": None})
    assert (found.kind, found.key, found.what) == ("changing", "r", what)
    assert found.mend == f"unless a command does this now: {mend}"


@pytest.mark.parametrize(
    ("said", "alive", "kinds"),
    [(b"7 t", [b"m"], []), (b"9007199254740991 ", [b"m"], ["owner"]), (b"7 t", [], ["owner"]), (None, [b"m"], [])],
)
def test_a_held_slot_has_a_live_holder(said: bytes | None, alive: list[bytes], kinds: list[str]) -> None:
    facts = {} if said is None else {b"m:m": said}
    told = [*check_members({b"alive": 1, b"held": 1}, {b"t:0": b"m"}, dict.fromkeys(alive, 9), facts, 0)]
    assert [(one.kind, one.key, one.mend) for one in told] == [(kind, "held", "HDEL held t:0") for kind in kinds]


@pytest.mark.parametrize(("noted", "numbers"), [(b"", []), (b"1 16384", [1, 16_384]), (b"16385", None), (b"0", None)])
def test_a_topic_had_as_many_slots_as_one_can_have(noted: bytes, numbers: list[int] | None) -> None:
    assert parse_slot_counts(noted) == numbers
    kinds = [one.kind for one in check_slot_counts(b"r", b"t was", noted)]
    assert kinds == ([] if numbers is not None else ["undecodable"])


# -- one slot ---------------------------------------------------------------------------------------------------------

SLOT = Slot("n", "t", 0, 1)
MESSAGE: dict[str, Any] = {"acc": b"\x01\xc0", "first": NOW, "last": NOW, "due": NOW}
TOKEN = b"%d" % (NOW * 1000)


def found(slot: Slot = SLOT, meta: dict[bytes, bytes] | None = None, **parts: Any) -> list[Finding]:
    """What is wrong with a slot of a topic that merges by "last"."""
    known = {b"v": b"3", b"fence": b"%d" % (NOW * 1000), b"lease": b"1000", b"term": b"1000", **(meta or {})}
    topic = TopicEntry(slot.slots, 1, merge_of("last"), False, 0)
    return check_slot(SlotView(slot, contents(meta=known, **parts), topic, Codec()))


def contents(**parts: Any) -> Contents:
    return Contents(NOW, **{one.name: {} for one in fields(Contents)[1:]} | parts)


def flying(entry: bytes = TOKEN, ends: float = NOW + 1000, **changes: Any) -> dict[str, Any]:
    message = pack_message(**MESSAGE | changes)
    return {"inflight": {b"k": entry}, "messages": {b"k": message}, "leases": {b"k": 1000 * (ends - 1000)}}


@for_each(
    ("name", "value"),
    [
        ("count", 0), ("acc", b"\xc1"), ("attempts", b"text"), ("failure", 7), ("version", 7), ("priority", b"text"),
        ("group", 7), ("splits", b"text"), ("earlier", 7), ("rank", 7), ("traces", 7), ("traces", [b"no"]), ("why", 10),
    ],
)  # fmt: skip
def test_a_message_with_a_corrupt_field_is_reported(name: str, value: Any) -> None:
    assert found(messages={b"k": pack_message(**MESSAGE)}, scheduled={b"k": NOW}) == []
    message = pack_message(**MESSAGE | {name: value})
    kinds = [one.kind for one in found(messages={b"k": message}, scheduled={b"k": NOW})]
    assert kinds == ["undecodable"]


@for_each("entry", [b"", b"0", b"-1", b"x", b"1 ", b"1 2 0 1", b"1 2 2 1 ", b"1 2 0 0 ", b"1 x 0 1 "])
def test_a_corrupt_entry_of_a_delivery_is_reported(entry: bytes) -> None:
    assert found(**flying()) == []
    assert [one.kind for one in found(**flying(entry))] == ["undecodable"]


@pytest.mark.parametrize("entry", [b" %d 0 2 " % NOW, b" %d 0 1 g" % NOW, b" %d 0 1 " % (NOW + 1)])
def test_an_entry_that_contradicts_its_message_is_reported(entry: bytes) -> None:
    assert found(**flying(TOKEN + b" %d 0 1 " % (NOW - 1))) == []  # flushed
    assert "disagrees" in [one.kind for one in found(**flying(TOKEN + entry))]


def test_a_delivery_without_its_message_is_reported() -> None:
    (orphan,) = found(leases={b"k": NOW * 1000})
    assert (orphan.kind, orphan.mend) == ("orphan", f"ZREM {SLOT.key('leases')} k")


def test_a_next_message_without_a_delivery_is_reported() -> None:
    (orphan,) = found(next={b"k": pack_message(**MESSAGE)})
    assert (orphan.kind, orphan.key) == ("orphan", SLOT.key("next"))


def test_a_lease_ends_no_later_than_the_longest_after_the_last_token() -> None:
    assert found(**flying(ends=NOW + 1001)) == []
    (late,) = found(**flying(ends=NOW + 1002))
    ends, latest = "2023-11-14 22:13:21.002Z", "2023-11-14 22:13:21.001Z"
    assert late.kind == "lease"
    assert late.what.startswith(f"the lease of 'k' ends at {ends}, and none of this slot can after {latest}: ")


def test_a_place_in_a_line_that_is_none_is_told_with_its_key() -> None:
    assert [(one.kind, one.key) for one in found(group_waiting={b"g": 0.0})] == [
        ("undecodable", SLOT.key("group:waiting"))
    ]


def test_a_group_holds_what_is_in_flight_of_it() -> None:
    flight = flying(TOKEN + b" %d 0 1 g" % NOW, group=b"g")
    inside = msgpack.packb([b"k"], use_bin_type=False)
    assert found(group_active={b"g": inside}, **flight) == []
    # And not what is in flight of another one, nor what is nowhere
    for parts, group in (
        ({"group_active": {b"g": inside, b"h": inside}, **flight}, "h"),
        ({"group_active": {b"g": inside}}, "g"),
    ):
        (held,) = found(**parts)
        assert (held.kind, held.mend) == ("held", f"HDEL {SLOT.key('group:active')} {group}")
        assert held.what == f"group {group!r} holds 'k', which is neither in flight nor between two attempts"


def test_a_letter_in_the_slot_of_others_is_told() -> None:
    letter = msgpack.packb([b"k", pack_message(**MESSAGE), b"why", NOW, 5], use_bin_type=False)
    mine = slot_of(b"k", 2)
    for number, kinds in ((mine, []), (1 - mine, [("wrong-slot", "dead:data")])):
        told = found(Slot("n", "t", number, 2), dead_data={b"5": letter}, dead={b"5": NOW})
        assert [(one.kind, one.key.partition("}:")[2]) for one in told] == kinds


def test_a_slot_that_holds_something_large_says_so() -> None:
    large = {"messages": {b"k": pack_message(**MESSAGE, failure=b"x" * 2000)}, "scheduled": {b"k": NOW}}
    assert found(meta={b"large": b"1"}, **large) == []
    (told,) = found(**large)
    assert (told.kind, told.key) == ("disagrees", SLOT.key("meta"))
    assert told.mend == f"HSET {SLOT.key('meta')} large 1"


def test_a_slot_that_was_emptied_for_good_can_still_be_counted() -> None:
    gone = {b"v": b"closed abc", b"gone": msgpack.packb([1, 2, 3]), b"accepted": b"6", b"acked_triggers": b"4"}
    assert balance(SlotView(SLOT, contents(meta=gone), None, Codec())) == 2


def test_what_an_audit_of_a_slot_answers_is_a_slot_or_its_size() -> None:
    asked = read_slot(SLOT, None, 1, 1)
    assert asked.answer([b"large", NOW, 5, 700]) == SlotTooLarge(5, 700)
    with pytest.raises(DecodeError, match="a part of -4 entries"):
        asked.answer([b"ok", NOW, -4])
