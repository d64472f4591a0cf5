"""Bytes of packed values are judged before objects are made of them: the two ways, and each header of either."""

from __future__ import annotations

import msgpack
import pytest

from idemgate.core.codec.decoding import unpack
from idemgate.core.codec.packing import _SCALAR_EXTS, Ext, looks_plain, measure, nests_at_most
from idemgate.errors import DecodeError
from tests.for_each import for_each

SHORT = [bytes([0xA0 + n]) + b"\xc4" * n for n in range(32)]
LONG = [b"\xd9\xff" + b"\xc4" * 255, b"\xda\x01\x00" + b"\xc4" * 256, b"\xdb\x00\x01\x00\x00" + b"\xc4" * 65_536]
PLAIN = [
    msgpack.packb(value)
    for value in (
        None, True, False, 0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1, -1, -32, -33, -128,
        -129, -32_768, -32_769, -(2**31), -(2**31) - 1, -(2**63), 1.5, "x" * 32, "x" * 255, "x" * 256, "x" * 65_536,
        [], [1], [1] * 15, [1] * 16, [1] * 65_536, {}, {"a": 1}, dict.fromkeys(range(15)), dict.fromkeys(range(16)),
    )
]  # fmt: skip
SINGLE = b"\xca\x00\x00\x00\x00"
ALL = [*SHORT, *LONG, *PLAIN, SINGLE]


@for_each("body", ALL, ids=lambda body: f"{body[:2].hex()}-{len(body)}")
def test_a_plain_value_is_known_as_such_both_ways_and_ends_where_it_ends(body: bytes) -> None:
    for packed in (body, b"\x91" + body, b"\x92" + body * 2):
        assert measure(packed, 3, 200_000)
        # Bytes of texts and numbers look like any header, and any number of them like containers
        assert looks_plain(packed, 3 + len(packed))
        for other in (packed[:-1], packed + b"\xc0"):
            with pytest.raises(ValueError, match=r"cut short|more bytes|never written"):
                measure(other, 3, 200_000)


@for_each("value", [b"", b"x", b"x" * 256, b"x" * 65_536, msgpack.ExtType(Ext.UUID, b"x" * 16),
    msgpack.ExtType(Ext.BIG_INT, b"1234567"), msgpack.ExtType(Ext.DECIMAL, b"1" * 300)])  # fmt: skip
def test_what_is_not_plain_is_told_by_both(value: object) -> None:
    for packed in (msgpack.packb(value), msgpack.packb([value, 1]), msgpack.packb({"a": "b" * 40, "c": [1.5, value]})):
        assert not measure(packed, 3, 100)
        assert not looks_plain(packed, len(packed))


@for_each("size", [1, 2, 4, 8, 16, 0, 3, 17, 255, 256, 65_536])
def test_an_extension_is_as_long_as_its_header_says_and_one_of_ours(size: int) -> None:
    for code in sorted(_SCALAR_EXTS):
        packed = msgpack.packb([msgpack.ExtType(code, b"\xc4" * size), 1])
        assert not measure(packed, 3, 9)
        for other in (packed[:-1], packed + b"\xc0"):
            with pytest.raises(ValueError, match=r"cut short|more bytes"):
                measure(other, 3, 9)
    for code in (0, 12, 127):
        with pytest.raises(ValueError, match=f"ext id {code} is unknown"):
            measure(msgpack.packb([msgpack.ExtType(code, bytes(size))]), 3, 9)


def test_how_many_values_there_are_is_counted_to_the_last() -> None:
    for value in ([1] * 9, {"a": 1, "b": [1, 2, 3, 4, 5]}, [[[], [], []], [[], [], [1]]]):
        assert measure(msgpack.packb(value), 4, 10)
        with pytest.raises(ValueError, match="it holds more than 9 values"):
            measure(msgpack.packb(value), 4, 9)


def test_a_byte_that_is_never_written_is_told() -> None:
    for body in (b"\xc1", b"\x92\x01\xc1"):
        with pytest.raises(ValueError, match="byte 0xc1 is never written"):
            measure(body, 3, 9)


def test_how_deep_bytes_may_nest_is_counted_by_what_could_begin_a_container() -> None:
    assert nests_at_most(msgpack.packb([[1]]), 2)
    assert not nests_at_most(msgpack.packb([[1]]), 1)
    assert nests_at_most(b"\xc4\x03abc", 0)
    assert looks_plain(msgpack.packb([[1]]), 2) is True
    assert looks_plain(msgpack.packb([[1]]), 1) is False
    # Also where the innermost is empty
    for empty in ({}, []):
        assert not nests_at_most(msgpack.packb([[empty]]), 2)
        assert looks_plain(msgpack.packb([[empty]]), 2) is False


def test_after_a_header_of_a_long_container_it_goes_on() -> None:
    many = msgpack.packb([["x" * 40] * 20, dict.fromkeys(range(20), "y" * 300), 1.5])
    assert looks_plain(many, len(many))
    assert not looks_plain(many[:-3] + b"\xc4\x00", len(many))
    # Also where what is in it looks like a binary header
    for header, one in ((b"\xdc\x00\x10", b"\xa1\xc4"), (b"\xdd\x00\x00\x00\x10", b"\xa1\xc4"),
            (b"\xde\x00\x10", b"\xa1\xc4\x01"), (b"\xdf\x00\x00\x00\x10", b"\xa1\xc4\x01")):  # fmt: skip
        assert looks_plain(header + one * 16, 99)
        assert not looks_plain(header + one * 15 + b"\xc4\x01x", 99)
    # A text that is longer than what is there is none
    for cut in (b"\xd9\x05a\xc4c", b"\xda\x00\x05\xc4", b"\xa5\xc4abc"):
        assert looks_plain(cut, 9) is False


def test_what_a_script_packed_nests_sixteen_levels_and_no_more() -> None:
    sixteen = b"\x91" * 16 + b"\x01"
    assert str(unpack(sixteen, "a thing")).count("[") == 16
    for deeper in (b"\x91" + sixteen, b"\x92" + sixteen + b"\xda\x20\x00" + b"x" * 8192):
        with pytest.raises(DecodeError, match="expected a thing: it nests deeper than 16 levels"):
            unpack(deeper, "a thing")
