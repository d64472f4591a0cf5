"""What can never work is refused with the value and the fix in its message, before anything is written."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
import tenacity

from idemgate import Gate, InvalidArgument
from tests.for_each import for_each

Stored = Callable[[], dict[bytes, bytes]]


def handle(k: str, n: int = 1) -> None:
    raise AssertionError("runs never")


async def awaiting_key(k: str, n: int = 1) -> str:
    return k


async def _later() -> AsyncIterator[str]:
    yield "k"


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"key": "{nope}"}, r"key='\{nope\}'.*not a parameter.*k, n"),
    ({"key": "{k}{n}"}, "run into each other"),
    ({"key": "{k._secret}"}, "_secret"),
    ({"key": "{}"}, "not a field"),
    ({"key": "{0}"}, "not a field"),
    ({"key": "{k!r}"}, "format"),
    ({"key": "{k:>10}"}, "format"),
    ({"key": "{k"}, "not a template"),
    ({"key": "constant"}, "no field"),
    ({"key": ""}, "no field"),
    ({"key": 7}, "key=7.*neither a template nor a callable"),
    ({"key": awaiting_key}, "coroutine"),
    ({"fingerprint": ["nope"]}, "fingerprint.*nope.*k, n"),
    ({"fingerprint": []}, "names nothing"),
    ({"fingerprint": 5}, "names no fields"),
    ({"fingerprint": [7]}, "not a field"),
    ({"fingerprint": awaiting_key}, "coroutine"),
    ({"scope": ""}, "scope=''.*Use"),
    ({"scope": 7}, "scope=7.*Use"),
    ({"scope": "\ud800"}, "scope=.*Use"),
    *(
        ({name: value}, f"{name}=.*{text}.*Pass|{name}=.*{text}.*seconds")
        for name in ("retention", "lease", "wait")
        for value, text in (
            (0, "zero"),
            (-1, "negative"),
            ("-1s", "not a duration"),
            (math.nan, "not a finite"),
            (math.inf, "not a finite"),
            ("1 fortnight", "not a duration"),
            ("", "not a duration"),
            (0.0001, "shorter than a millisecond"),
            (timedelta(days=-1), "negative"),
            (timedelta(days=365_000), "longer than 100 years"),
            (True, "not a duration"),
            (None, "not a duration"),
            (datetime(2026, 1, 1), "not a duration"),  # noqa: DTZ001 - naive on purpose
        )
    ),
    ({"on_done": "reply"}, r"on_done='reply'.*'replay', 'skip', 'raise'"),
    ({"on_in_progress": "block"}, r"on_in_progress='block'.*'raise', 'skip', 'wait'"),
    ({"on_error": "ignore"}, r"on_error='ignore'.*'release', 'keep', 'store'"),
    ({"on_error": None}, "on_error=None"),
    ({"on_lease_loss": "run"}, r"on_lease_loss='run'.*'retry', 'hold'"),
    ({"on_store_error": "skip"}, r"on_store_error='skip'.*'raise', 'run', 'local'"),
    ({"on_store_error": []}, r"on_store_error=\[\]"),
    ({"max_attempts": 0}, "max_attempts=0.*at least 1"),
    ({"max_attempts": -1}, "max_attempts=-1"),
    ({"max_attempts": 1.5}, "max_attempts=1.5"),
    ({"max_attempts": True}, "max_attempts=True"),
    ({"max_result_bytes": 0}, "max_result_bytes=0.*at least 1"),
    ({"max_result_bytes": "1k"}, "max_result_bytes='1k'"),
    ({"cache_size": -1}, "cache_size=-1.*at least 0"),
    ({"cache_size": 1.0}, "cache_size=1.0"),
    ({"retry": 3}, "retry=3.*tenacity"),
    ({"retry": tenacity.AsyncRetrying()}, "retry=.*async policy"),
    ({"at_most_once": True, "on_error": "store"}, "on_error='store'.*at_most_once.*Drop on_error"),
    ({"at_most_once": True, "on_lease_loss": "hold"}, "on_lease_loss='hold'.*at_most_once"),
    ({"at_most_once": True, "max_attempts": 3}, "max_attempts=3.*at_most_once"),
    ({"at_most_once": True, "retry": tenacity.Retrying()}, "retry=.*at_most_once"),
    ({"at_most_once": True, "on_done": "replay"}, "on_done='replay'.*at_most_once.*'skip' or 'raise'"),
]


@for_each(("options", "says"), OPTIONS, ids=[f"{'-'.join(o)}{n}" for n, (o, _) in enumerate(OPTIONS)])
def test_options_that_cannot_work_are_refused_at_decoration(gate: Gate, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){says}") as refused:
        gate.once(**{"key": "{k}"} | options)(handle)
    assert refused.value.fix
    assert gate.context._link is None  # no connection was even made


def test_decorating_something_that_is_no_function_is_refused(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match=r"function='x'.*Pass a function"):
        gate.once(key="{k}")("x")  # type: ignore[call-overload]


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    *(
        (method, (key, *more), {}, f"{name}.*{text}")
        for method, more, name in (
            ("claim", (), "key"),
            ("first", ("1h",), "key"),
            ("inspect", (), "key"),
            ("forget", (), "key"),
        )
        for key, text in (
            ("", "empty"),
            (b"", "empty"),
            (None, "NoneType is not a key"),
            (1.5, "float is not a key"),
            (True, "bool is not a key"),
            (["a"], "list is not a key"),
            ("\ud800", "Unicode"),
            ("x" * 65_537, "65,536"),
        )
    ),
    ("claim", ("k",), {"lease": 0}, "lease=0"),
    ("claim", ("k",), {"lease": math.nan}, "lease=nan"),
    ("claim", ("k",), {"lease": "-5s"}, "lease='-5s'"),
    ("claim", ("k",), {"retention": -1}, "retention=-1"),
    ("claim", ("k",), {"fingerprint": object()}, "fingerprint"),
    ("claim", ("k",), {"on_lease_loss": "x"}, "on_lease_loss='x'"),
    ("claim", ("k",), {"max_attempts": 0}, "max_attempts=0"),
    ("claim", ("k",), {"scope": ""}, "scope=''"),
    ("first", ("k", 0), {}, "retention=0"),
    ("first", ("k", "1h"), {"scope": ""}, "scope=''"),
    ("first_many", (["a", ""], "1h"), {}, "key=''"),
    ("first_many", (["a"], -1), {}, "retention=-1"),
    *(("first_many", (many, "1h"), {}, "keys=.*cannot be iterated over.*Pass") for many in (None, 7, _later())),
    ("inspect", ("k",), {"scope": ""}, "scope=''"),
    ("forget", ("k",), {"scope": ""}, "scope=''"),
    ("resolve", ("",), {"done": True}, "key=''"),
    ("resolve", ("k",), {"done": True, "result": object()}, "result"),
    ("resolve", ("k",), {"done": True, "retention": 0}, "retention=0"),
]


@for_each(("method", "args", "options", "says"), CALLS, ids=[f"{call[0]}{n}" for n, call in enumerate(CALLS)])
async def test_calls_that_cannot_work_are_refused_before_anything_is_written(
    face: Any, stored: Stored, method: str, args: tuple[Any, ...], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){says}"):
        await getattr(face, method)(*args, **options)
    assert stored() == {}


DEDUP_CALLS: list[tuple[str, Any, str, tuple[Any, ...], str]] = [
    # scope, retention, method, its arguments, what the error says
    ("s", "1h", "add", ("",), "key=''"),
    ("s", 0, "add", ("k",), "retention=0"),
    ("", "1h", "add", ("k",), "scope=''"),
    ("s", "1h", "add_many", (["a", ""],), "key=''"),
    ("s", "1h", "add_many", ("abc",), "one value, not many"),
    *(
        ("s", "1h", method, (many,), f"{name}=.*cannot be iterated over.*Pass")
        for method, name in (("add_many", "keys"), ("get_or_set_many", "pairs"))
        for many in (None, 7, _later())
    ),
    ("s", "1h", "get_or_set", ("", 1), "key=''"),
    ("s", 0, "get_or_set", ("k", 1), "retention=0"),
    ("", "1h", "get_or_set", ("k", 1), "scope=''"),
    ("s", "1h", "get_or_set_many", ([("a", 1), ("", 2)],), "key=''"),
    ("s", "1h", "get_or_set_many", (["ab"],), "pairs='ab': not a key and its value. Pass .*items"),
    ("s", "1h", "get_or_set_many", ("abc",), "one value, not many"),
    ("s", "1h", "get", ("",), "key=''"),
    ("", "1h", "get", ("k",), "scope=''"),
]


@for_each(
    ("scope", "retention", "method", "args", "says"),
    DEDUP_CALLS,
    ids=[f"{call[2]}{n}" for n, call in enumerate(DEDUP_CALLS)],
)
async def test_a_dedup_call_with_an_invalid_argument_raises_before_a_write(
    face: Any, stored: Stored, scope: str, retention: Any, method: str, args: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){says}"):
        await getattr(face.dedup(scope, retention), method)(*args)
    assert stored() == {}


async def test_a_claim_refuses_what_it_cannot_do_and_is_still_held(face: Any, stored: Stored) -> None:
    claim = await face.claim("k")
    before = stored()
    for refused in (
        lambda: claim.complete(object()),
        lambda: claim.complete(retention=0),
        lambda: claim.complete(retention="soon"),
        lambda: claim.extend(-1),
        lambda: claim.extend(0),
        lambda: claim.checkpoint({1.5: object()}),
        lambda: claim.wait(-1),
    ):
        with pytest.raises(InvalidArgument):
            await refused()
    assert stored() == before
    assert await claim.complete()


def test_a_function_whose_arguments_cannot_be_stored_needs_a_key(gate: Gate, stored: Stored) -> None:
    @gate.once()
    def work(value: object) -> None:
        raise AssertionError("runs never")

    with pytest.raises(InvalidArgument, match=r"without key= every argument counts"):
        work(object())
    assert stored() == {}


def test_a_fingerprint_that_cannot_be_stored_is_refused(gate: Gate, stored: Stored) -> None:
    @gate.once(key="{k}", fingerprint=["value"])
    def work(k: str, value: object) -> None:
        raise AssertionError("runs never")

    with pytest.raises(InvalidArgument, match=r"fingerprint\['value'\]"):
        work("x", object())
    assert stored() == {}


@for_each("namespace", ["", "a b", "a{b}", "x" * 65, "a:b", None, 7])
def test_a_namespace_is_a_name(namespace: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"namespace=.*Use 1 to 64"):
        Gate("redis://localhost", namespace=namespace)
