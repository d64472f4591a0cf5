"""Requests that are framed by hand are the ones that packing word by word gives."""

from __future__ import annotations

from typing import Any

from idemgate.core.calls import Call, new_id
from idemgate.guard.claim_calls import Claims
from idemgate.store.resp import pack_command
from idemgate.testing import Clock
from idemgate.topics.messages import Trigger
from tests.for_each import for_each
from tests.unit.test_topic_calls import calls as topic_calls

CLAIMS = Claims("ns", None)
NOW = 1_790_000_000_000_000


def _packed(call: Call[object]) -> bytes:
    return pack_command(("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args))


@for_each("key", ["k", "order:7", "100%d%b", "ü" * 50, "x" * 1000])
@for_each("options", [{}, {"max_attempts": 3}, {"hold": True}, {"wait": True}, {"max_attempts": 10**12}])
def test_a_claim_is_framed_as_it_is_packed(key: str, options: dict[str, int]) -> None:
    call = CLAIMS.claim(CLAIMS.key("s", key), new_id(), 30_000, 86_400_000, **options)
    assert call.framed == _packed(call)


@for_each("result", [b"", b"v", b"\r\n$1\r\n", b"%b", bytes(range(256)) * 100])
@for_each("kind", [b"v", b"n", b"e"])
def test_a_completion_is_framed_as_it_is_packed(result: bytes, kind: bytes) -> None:
    call = CLAIMS.complete(CLAIMS.key("s", "k"), new_id(), NOW, 60_000, kind, result)
    assert call.framed == _packed(call)


@for_each("key", ["k", "100%d%b", "ü" * 50, b"\r\n$1\r\n"])
@for_each("options", [{}, {"delay": 3}, {"event_id": "e"}, {"group": "g", "version": 7}, {"payload": "x" * 70_000}])
def test_a_trigger_is_framed_as_it_is_packed(key: str | bytes, options: dict[str, Any]) -> None:
    call = topic_calls(slots=8).trigger(Trigger(key, **options))
    assert call.framed == _packed(call)


def test_what_differs_in_length_is_packed_word_by_word() -> None:
    record, told = CLAIMS.key("s", "k"), Claims("ns", Clock(1_790_000_000))
    for call in (
        CLAIMS.claim(record, b"me", 1, 1),
        CLAIMS.claim(record, new_id(), 1, 1, b"print of sixteen"),
        told.claim(record, new_id(), 1, 1),
        CLAIMS.complete(record, b"me", NOW, 1, b"v", b""),
        CLAIMS.complete(record, new_id(), 7, 1, b"v", b""),
        CLAIMS.complete(record, new_id(), 10**16, 1, b"v", b""),
        told.complete(record, new_id(), NOW, 1, b"v", b""),
    ):
        assert call.framed == b""
