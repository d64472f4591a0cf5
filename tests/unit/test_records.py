"""The record of a guarded key, as those read it who look from outside."""

from __future__ import annotations

import struct

import pytest

from idemgate.guard.claim_calls import Claims
from idemgate.guard.record import decode_record
from tests.for_each import for_each


def _long(letter: bytes, owner: bytes, print_: bytes, data: bytes) -> bytes:
    """As `guard/scripts/lib/format.lua` packs it."""
    numbers = b"".join(number.to_bytes(width, "big") for number, width in ((7, 7), (8, 6), (9, 6), (1, 4), (0, 4)))
    lease = (0 if letter == b"r" else 30_000).to_bytes(6, "big")
    return b"\xc1" + letter + numbers + lease + b"\1" + _short(owner) + _short(print_) + data


def _short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


@for_each(
    ("letter", "state", "kind"),
    [
        (b"p", "in progress", b""),
        (b"r", "released", b""),
        (b"v", "done", b"v"),
        (b"n", "done", b"n"),
        (b"e", "failed", b"e"),
    ],
)
@for_each("owner", [b"", b"o" * 16, b"o" * 255])
@for_each("fingerprint", [b"", b"f" * 16])
def test_the_long_form_says_anything(letter: bytes, state: str, kind: bytes, owner: bytes, fingerprint: bytes) -> None:
    packed = _long(letter, owner, fingerprint, b"data")
    assert decode_record(packed) == (state, kind, b"data", 7, 8)
    # What is cut within its fields is none
    for cut in (1, len(packed) - len(b"data") - 1):
        with pytest.raises(ValueError, match="unknown state or truncated fields"):
            decode_record(packed[:cut])


def test_the_shared_failure_of_a_released_record_is_not_its_checkpoint() -> None:
    plain = _long(b"r", b"", b"", b"failuredata")
    packed = plain[:29] + len(b"failure").to_bytes(6, "big") + plain[35:]
    assert decode_record(packed) == ("released", b"", b"data", 7, 8)
    with pytest.raises(ValueError, match="unknown state or truncated fields"):
        decode_record(packed[: -len(b"edata")])


@for_each(
    ("code", "kind", "beside"),
    [
        (248, b"v", 0), (249, b"v", 16), (250, b"n", 0), (251, b"n", 16), (252, b"e", 0), (253, b"e", 16),
        (254, b"n", 16), (255, b"n", 32),
    ],
)  # fmt: skip
def test_the_short_form_says_what_was_done_at_the_first_attempt(code: int, kind: bytes, beside: int) -> None:
    head = bytes([code]) + struct.pack(">Q", 7)[1:] + b"\0\1\0\2"
    found = decode_record(head + b"x" * beside + b"data")
    assert found == ("failed" if kind == b"e" else "done", kind, b"data", 7, 120_001)
    assert decode_record(head + b"x" * beside).data == b""
    with pytest.raises(ValueError, match="unknown state or truncated fields"):
        decode_record((head + b"x" * beside)[:-1])


@pytest.mark.parametrize("packed", [b"", b"text", bytes([194]), bytes([244]) + b"x" * 40, b"\xc1"])
def test_anything_else_is_none(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"unknown state|unknown first byte"):
        decode_record(packed)


@for_each(("code", "kind"), [(245, b"v"), (246, b"n"), (247, b"e")])
def test_a_completion_by_a_plain_command_ends_with_its_key(code: int, kind: bytes) -> None:
    packed = bytes([code]) + (7).to_bytes(7, "big") + b"\0\2data"
    assert decode_record(packed, 9) == ("failed" if kind == b"e" else "done", kind, b"data", 7, 9)
    with pytest.raises(ValueError, match="truncated"):
        decode_record(packed[:9], 9)


def test_the_times_of_a_claim_by_a_plain_command_follow_from_the_expiry_of_its_key() -> None:
    packed = b"\xc0\0" + (30).to_bytes(6, "big") + (100).to_bytes(6, "big") + b"o" * 16
    assert decode_record(packed, 1100) == ("in progress", b"", b"", 1_000_000, 1030)
    for wrong in (packed[:-1], packed + b"o"):
        with pytest.raises(ValueError, match="truncated"):
            decode_record(wrong, 1100)


def test_the_times_of_a_mark_by_a_plain_command_follow_from_the_expiry_of_its_key() -> None:
    packed = b"\xc0" + (100).to_bytes(6, "big") + b"o" * 16
    assert decode_record(packed, 1100) == ("done", b"n", b"", 1_000_000, 1100)
    for wrong in (packed[:-1], packed + b"o"):
        with pytest.raises(ValueError, match="truncated"):
            decode_record(wrong, 1100)


@for_each("code", [*range(240, 245), 0, 194])
def test_what_begins_as_no_record_does_is_none(code: int) -> None:
    with pytest.raises(ValueError, match="unknown first byte"):
        decode_record(bytes([code]) + bytes(40))


@pytest.mark.parametrize(("left_ms", "state", "left"), [(2, "in_progress", 0.002), (1, "in_progress", 0.001),
    (0, "lapsed", None), (-1, "lapsed", None)])  # fmt: skip
def test_a_lease_is_held_to_its_last_millisecond(left_ms: int, state: str, left: float | None) -> None:
    asked = Claims("n", None).inspect((b"k",))
    found = asked.answer([b"ok", 9000, b"p", b"o" * 16, 7, 1, left_ms, 60_000, b"", b"", b"", b"", 0, b"0", 8000])
    assert (found.state, found.lease_left, found.retention_left) == (state, left, None)
