"""Whatever bytes stand where ours should: they decode or are refused with the documented error, in bounded memory.

`IDEMGATE_FUZZ=200000` for more examples; a large run of faults (`tools/reliability.py`) tries about as many of each
decoder as it injects of each fault.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import redis.exceptions as rx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from idemgate import Gate
from idemgate.errors import StoreError
from idemgate.store.resp import PlainReader
from idemgate.testing import Clock
from tests.conftest import FAULTS
from tests.for_each import for_each
from tests.security.decoders import CALLS, DECODERS, check_memory, refused_or_read
from tests.security.test_acl import Scene, dumped, restored, stored

N = int(os.environ.get("IDEMGATE_FUZZ", max(60, FAULTS)))
FUZZED = settings(max_examples=N, deadline=None)
BOMBS = [
    b"\xdd\xff\xff\xff\xff" * 200, b"\xdc\xff\xff" * 1300, b"\x91" * 3000, b"\xdf\xff\xff\xff\xff" * 100,
    b"\x81" * 3000,
    b"\xc9\xff\xff\xff\xff\x07" * 10, b"\xc8\xff\xff\x07" * 40, b"\xdb\xff\xff\xff\xff", b"\xc7\x04\x07" * 1000,
    b"\xd4\x07\x91" * 1000,
    b"\x90" * 5000, b"\x01\xdd\x00\x00\x10\x00" * 600, b"\x01" + b"\x91" * 2000,
]  # fmt: skip
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=9)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=14) | st.dictionaries(st.text(max_size=9) | st.integers(0, 9), inner, max_size=5)
    ),
    max_leaves=30,
)
packed = trees.map(lambda tree: msgpack.packb(tree, use_bin_type=False, unicode_errors="surrogatepass"))


@st.composite
def nearly(draw: st.DrawFn) -> list[Any]:
    """An array that is almost a message, with some of its places spoilt."""
    fields: list[Any] = [1, 1, 1, 1, 1, "now", 0, "", b"\x01\x01", "", 0, "", 1, 0]
    for place in draw(st.lists(st.integers(0, 13), max_size=3)):
        fields[place] = draw(trees)
    return fields


messages = nearly().map(lambda fields: msgpack.packb(fields, use_bin_type=False, unicode_errors="surrogatepass"))
records = st.builds(
    lambda form, rest: form + rest,
    st.sampled_from([bytes([code]) for code in range(247, 256)] + [b"\xc1" + b"%c" % state for state in b"prvnex"]),
    st.binary(max_size=90),
)
"""Almost records of guarded keys, short and long."""
hostile = st.binary(max_size=200) | packed | messages | records | st.sampled_from(BOMBS)
"""Bytes, and values that another version or another program may have packed."""


@pytest.mark.timeout(120 if N == 60 else 0)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.slow
def test_any_bytes_decode_or_are_refused(name: str, record_fault: Callable[..., None]) -> None:
    tried = 0

    @FUZZED
    @given(data=hostile | hostile.map(lambda data: b"\x01" + data))
    def any_bytes(data: bytes) -> None:
        nonlocal tried
        tried += 1
        refused_or_read(name, data)

    any_bytes()
    record_fault(f"bytes that others may have written, given to each of {len(DECODERS)} decoders", tried)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.slow
def test_a_few_bytes_cannot_ask_for_much_memory(name: str) -> None:
    for bomb in [*BOMBS, *(b"\x01" + bomb for bomb in BOMBS)]:
        check_memory(name, bomb)


FOUND = [
    ("answer", b"\0:1\r\n"), ("answer", b"\0*0\r\n"),
    *[("answer", b"%c*3\r\n$2\r\nok\r\n:1700000000000\r\n:-1\r\n" % number) for number in range(len(CALLS))],
    ("cluster", b"MOVED x y"), ("cluster", b"MOVED 99999 h:1"), ("cluster", b"*1\r\n:1\r\n"),
    ("url", b"redis\n1?\n=1\nh"), ("url", b"redis+cluster\n1?\n=1\nh"), ("url", b"redis+sentinel\n\n\nh/s/\xc2\xb2"),
    ("url", b"redis\n12:\n\n["),
    ("audited", b"e" + b"9" * 5000 + b"\0" + b"x" * 24),
    ("forwarded", msgpack.packb([2, 2**40, 1, b""])),
    ("policy", msgpack.packb({"edge": "trailing", "merge": {"op": "last"}, "slots": 1, "remember": 1, 10: 1})),
    ("policy", msgpack.packb({"edge": "trailing", "merge": {"op": "last"}, "slots": 1, "window": "x"})),
    ("template", b"{a}\xaf{b}\0x"),
    ("cron", b"* * * * *\0Europe"), ("cron", b"* * * * *\0" + b"x" * 300),
    ("pattern", b"*a" * 12 + b"*b\0" + b"a" * 4000),
]  # fmt: skip


@for_each(("name", "data"), FOUND)
def test_what_was_found_once_is_refused(name: str, data: bytes) -> None:
    refused_or_read(name, data)


REPLIES = st.binary(max_size=60) | st.lists(
    st.sampled_from([b"*", b"$", b":", b"+", b"-", b"1", b"-1", b"3", b"99999999999", b"\r\n", b"\r", b"abc", b"_"]),
    max_size=20,
).map(b"".join)  # fmt: skip


@FUZZED
@given(data=REPLIES, cut=st.integers(0, 60))
@example(data=b"*1\r\n" * 5000 + b":1\r\n", cut=7)
@example(data=b":" + b"9" * 5000 + b"\r\n", cut=3)
@example(data=b"*99999999999\r\n:1\r\n", cut=3)
def test_any_reply_is_read_or_refused(data: bytes, cut: int) -> None:
    reader = PlainReader()
    with suppress(rx.InvalidResponse):
        for part in (data[:cut], data[cut:]):
            reader.feed(part)
            while reader.gets() is not False:
                pass


# -- what scripts read ------------------------------------------------------------------------------------------------

SPOILT = {
    "nothing": b"", "text": b"hello world", "a number": msgpack.packb(7), "nil": b"\xc0", "an empty array": b"\x90",
    "a short array": b"\x91\x01", "an array of texts": msgpack.packb(["x"] * 14, use_bin_type=False),
    "a deep array": b"\x91" * 200, "a cut array": b"\xdc\xff\xff\x01", "a map": msgpack.packb({"a": 1}),
}  # fmt: skip


@pytest.mark.damages("changing")
@pytest.mark.slow
def test_what_a_script_cannot_read_makes_it_refuse_before_it_writes(
    gate: Gate, clock: Clock, raw: Any, namespace: str
) -> None:
    # Given something everywhere
    scene = Scene(gate)
    saved = dumped(raw, namespace)
    holds = [(key, field) for key in saved if raw.type(key) == b"hash" for field in raw.hkeys(key)]
    cases = [
        (call, *where, name)
        for call in scene.calls for where in holds for name in SPOILT
        if where[0] in call.keys and where[1] != b"v"
    ]  # fmt: skip
    rng, refused = random.Random(13), 0
    for call, key, field, name in rng.sample(cases, min(len(cases), max(N * 2, 300))):
        # When one field holds what we never wrote, and any call is made
        restored(raw, namespace, saved)
        raw.hset(key, field, SPOILT[name])
        before = stored(raw, namespace)
        try:
            gate.context.link.run(call)
        except StoreError:
            # Then it does its work, or says so and has changed nothing
            refused += 1
            assert stored(raw, namespace) == before, (call.script.name, key, field, name)
    restored(raw, namespace, saved)
    assert refused
    print(f"{len(cases)} cases, {refused} refused")
