"""Properties of the pure parts: no two requests share a record by chance, and no credential is ever stored."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from idemgate_http import Headers, Response, record_key
from idemgate_http.core import HttpGuard, Selected
from idemgate_http.keys import MOST_CHARACTERS, parse_key
from idemgate_http.options import HttpOptions
from idemgate_http.request import Request
from idemgate_http.response import NEVER_KEPT, REPLAYABLE, pack, unpack

from idemgate import Gate, InvalidArgument
from tests.for_each import for_each

PARTS = st.tuples(*[st.text(max_size=6)] * 4)
TYPED = st.tuples(
    st.integers(0, 99) | st.uuids() | st.integers(0, 99).map(str) | st.text(max_size=6), *[st.text(max_size=6)] * 3
)
NAMES = st.sampled_from([*sorted(NEVER_KEPT | REPLAYABLE), "x-cost", "x-other"]).flatmap(
    lambda name: st.sampled_from([name, name.title(), name.upper()])
)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@given(TYPED, TYPED)
@example((7, "", "", ""), ("7", "", "", ""))
@example(("\ud800", "", "", ""), ("\udcc3\udca9", "", "", ""))
@example(("\udcc3\udca9", "", "", ""), ("é", "", "", ""))
@example(("", "", "", "\udcc3\udca9"), ("", "", "", "é"))
def test_different_requests_have_different_records(one: Any, other: Any) -> None:
    assert (record_key(*one) == record_key(*other)) == (one == other)


def test_a_caller_that_python_cannot_write_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"caller.*int of 16610 bits.*hash"):
        record_key(10**5000, "POST", "/pay", "k")


@given(PARTS, st.integers(0, 2), st.integers(1, 5))
def test_moving_text_from_one_part_to_the_next_makes_another_record(parts: Any, at: int, count: int) -> None:
    moved = [*parts]
    moved[at], moved[at + 1] = parts[at][:-count], parts[at][-count:] + parts[at + 1]
    assert (record_key(*moved) == record_key(*parts)) == (moved == [*parts])


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=MOST_CHARACTERS))
def test_every_string_of_the_draft_is_read(key: str) -> None:
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert parse_key(quoted) == key
    bare = parse_key(key)
    assert bare is None or bare == key or key.startswith('"') or key != key.strip()


@given(st.text(max_size=300))
def test_whatever_a_header_holds_its_key_is_short_and_printable(field: str) -> None:
    key = parse_key(field)
    assert key is None or (0 < len(key) <= MOST_CHARACTERS and key.isascii() and key.isprintable())


@given(VALUES.filter(lambda text: ";" not in text), st.text('=;"\\ \tab', max_size=30))
def test_any_content_type_is_read(kind: str, parameters: str) -> None:
    spellings = [f"{kind};{parameters}", f" {kind.upper()}\t; charset=utf-8;{parameters}"]
    found = [Request("POST", "/", b"", Headers([("content-type", one)]), None).media_type for one in spellings]
    assert found[0] == found[1]
    assert found[0].startswith(kind.strip().lower())


@given(st.text(max_size=9), st.text(max_size=9))
def test_the_repr_of_a_request_is_one_line(method: str, path: str) -> None:
    assert repr(Request(method, path, b"", Headers([]), None)).isprintable()


def media_type(field: str) -> str:
    return Request("POST", "/", b"", Headers([("content-type", field)]), None).media_type


@for_each(
    ("one", "other", "same"),
    [
        ('text/x;a="1;b=2"', "text/x;a=1;b=2", False),
        ('text/x;a="1"', "text/x;a=1", True),
        (r'text/x;a="1\";b=\"2"', r'text/x;a="1";b="2"', False),
        (r'text/x;a="\\"', 'text/x;a=""', False),
        ("text/x;charset='utf-8'", "text/x", True),
        ("text/x;charset='latin-1'", "text/x", False),
        ("text/x;charset=latin-1;charset=utf-8", "text/x;charset=latin-1", False),
        ("text/x;strict", "text/x;lax", False),
        ("text/x;strict", "text/x;strict=", False),
        ("text/x; Strict ;;", "text/x;strict", True),
        ("text/x;v=1;v=2", "text/x;v=2", False),
        ("text/x;v=1;v=2", "text/x;v=2;v=1", False),
        ("text/x;v=1;a=1;V=2", "text/x;a=1;v=1;v=2", True),
        ('text/x;v="1"2', "text/x;v=1", False),
        ("text/x;a b=1", "text/x;b=1", False),
        ("text/x;boundary=1", "text/x;boundary=2", False),
        ("multipart/x;boundary=1", "multipart/x;boundary=2", True),
    ],
)
def test_two_spellings_are_one_media_type_only_with_the_same_parameters(one: str, other: str, same: bool) -> None:
    assert (media_type(one) == media_type(other)) == same


@given(st.lists(st.tuples(NAMES, VALUES), max_size=20), st.sets(st.sampled_from([*sorted(NEVER_KEPT), "x-cost"])))
def test_no_credential_and_nothing_unlisted_is_stored(headers: Any, extra: set[str]) -> None:
    allowed = REPLAYABLE | extra  # the options refuse such names; the filter does not rely on that
    stored = unpack(pack(Response(200, tuple(headers), b"x"), allowed))
    assert stored is not None
    assert stored.response is not None
    kept = [(name, value) for name, value in headers if name.lower() in allowed - NEVER_KEPT]
    assert [*stored.response.headers] == kept


ANYTHING = st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=8)
NEARLY = st.tuples(
    st.just(1) | ANYTHING,
    st.integers(90, 1010) | ANYTHING,
    st.lists(st.lists(st.text(), min_size=2, max_size=2) | ANYTHING, max_size=3) | ANYTHING,
    st.binary() | ANYTHING,
    st.text() | ANYTHING,
)


@given(ANYTHING | NEARLY | NEARLY.map(list))
@example([1, 200, [["etag", "1"]], b"x", ""])
@example([1, 200, [["etag"]], b"x", ""])
@example([True, None, "0", None, None])
def test_what_another_program_stored_is_no_response(value: Any) -> None:
    """Whatever a record holds, only a response with the types of a response is replayed."""
    stored = unpack(value)
    whole = (
        isinstance(value, list | tuple)
        and [type(part) for part in value[1:2] + value[3:]] == [int, bytes, str]
        and isinstance(value[2], list | tuple)
        and value[0] == 1
        and 100 <= value[1] <= 999
        and all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in value[2])
    )
    assert (stored is not None) == whole
    if stored is not None and stored.response is not None:
        assert (stored.status, stored.response.status) == (value[1], value[1])
        assert ([[*pair] for pair in stored.response.headers], stored.response.body) == (value[2], value[3])


_numbers = itertools.count()
REQUESTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["POST", "PATCH"]), st.sampled_from(["/x", "/y"]),
              st.sampled_from(["k", "l"]), st.sampled_from([b"1", b"2"]), st.sampled_from([201, 404])),
    min_size=1, max_size=25,
)  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Any:
    with Gate("embedded://", namespace=f"hp{os.getpid()}") as gate:
        yield gate


@settings(max_examples=60, deadline=None)  # the first one may start the server
@given(REQUESTS)
def test_a_caller_gets_only_answers_to_its_own_requests(shared: Gate, requests: Any) -> None:
    """Compare any order of requests with a model: a dict from (caller, method, path, key) to the first kept answer."""
    options: HttpOptions = {"caller": lambda request: request.headers["x"], "scope": f"p{next(_numbers)}"}
    core = HttpGuard(shared, options, HttpOptions)
    model: dict[Any, tuple[bytes, bytes]] = {}
    for number, (caller, method, path, key, body, status) in enumerate(requests):
        secret = f"{caller} {number}".encode()
        request = Request(method, path, b"", Headers([("x", caller), ("idempotency-key", key)]), None)
        selected = core.select(request)
        assert isinstance(selected, Selected)
        admission: Any = core.admit(selected, body)

        def run(status: int = status, secret: bytes = secret, request: Request = request) -> Any:
            return core.pack(request, Response(status, (), secret))

        verdict = core.guard.run(admission.key, run, fingerprint=admission.fingerprint)
        answer = core.answer(verdict)
        first = model.get((caller, method, path, key))
        if first is None:
            assert answer is None
            assert verdict.ran
            if status == 201:
                model[caller, method, path, key] = body, secret
        elif first[0] != body:
            assert answer is not None
            assert answer.status == 422
        else:
            assert answer is not None
            assert (answer.status, answer.body) == (201, first[1])
            assert answer.body.startswith(caller.encode())


CODINGS = st.sampled_from([None, "", "gzip", "3:a=1"])
PIECES = st.tuples(
    st.sampled_from([b"", b"a=1"]), st.sampled_from(["", "1:b"]), CODINGS, st.sampled_from([b"", b"1:b"])
)


def fingerprint(gate: Gate, query: bytes, kind: str, coding: str | None, body: bytes) -> Any:
    headers = [("content-type", kind), *([] if coding is None else [("content-encoding", coding)])]
    core = HttpGuard(gate, {"single_tenant": True}, HttpOptions)
    return core._fingerprint(Request("POST", "/pay", query, Headers(headers), None), body)


@given(PIECES, PIECES)
def test_different_payloads_have_different_fingerprints(shared: Gate, one: Any, other: Any) -> None:
    same = [(query, kind, coding or None, body) for query, kind, coding, body in (one, other)]
    assert (fingerprint(shared, *one) == fingerprint(shared, *other)) == (same[0] == same[1])


def test_a_fingerprint_without_a_content_encoding_is_that_of_stored_records(shared: Gate) -> None:
    found = fingerprint(shared, b"a=1", "application/json", None, b"{}")
    assert found.hex() == "d03c2faa729727e29a9689313740424fc6e63d1a"
