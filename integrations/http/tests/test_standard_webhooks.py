"""Signatures, against the specification's own library and its published example."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from idemgate_http.webhooks import BadSignature, Secrets, StandardWebhooks, new_secret, sign
from standardwebhooks.webhooks import Webhook

from idemgate import InvalidArgument
from tests.for_each import for_each

KNOWN = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
AT = 1_614_265_330


def verify(secret: Secrets, headers: Any, body: bytes, now: float | None = None) -> str:
    """Return the id of a verified request."""
    event = StandardWebhooks(secret).verify(headers, body, now)
    assert event.id is not None
    return event.id


def headers(secret: str, body: bytes, at: int = AT, id: str = "msg_1") -> dict[str, str]:
    return {"webhook-id": id, "webhook-timestamp": str(at), "webhook-signature": sign(secret, id, at, body)}


@given(st.text(), st.integers(10**9, 2 * 10**9), st.binary(min_size=24, max_size=64))
def test_we_sign_as_the_reference_does(text: str, at: int, key: bytes) -> None:
    secret, body = "whsec_" + b64encode(key).decode(), json.dumps({"text": text}, ensure_ascii=True)
    theirs = Webhook(secret).sign("msg_1", datetime.fromtimestamp(at, UTC), body)
    assert sign(secret, "msg_1", at, body.encode()) == theirs


def test_the_published_example() -> None:
    signed = sign(KNOWN, "msg_p5jXN8AQM9LWM0D4loKWxJek", AT, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_reference_accepts_ours_and_we_accept_theirs() -> None:
    now, body = int(time.time()), b'{"a":1}'
    assert Webhook(KNOWN).verify(body, headers(KNOWN, body, now)) == {"a": 1}
    theirs = Webhook(KNOWN).sign("msg_1", datetime.fromtimestamp(now, UTC), body.decode())
    found = {"Webhook-Id": "msg_1", "Webhook-Timestamp": str(now), "Webhook-Signature": theirs}
    assert verify(KNOWN, found, body) == "msg_1"


def test_any_of_several_secrets_will_do_on_either_side() -> None:
    old, new = new_secret(), new_secret()
    both = {**headers(old, b"{}"), "webhook-signature": sign([new, old], "msg_1", AT, b"{}")}
    for receiving in (old, new, [new_secret(), old]):
        assert verify(receiving, both, b"{}", now=AT) == "msg_1"
    with pytest.raises(BadSignature, match="no signature"):
        verify(new_secret(), both, b"{}", now=AT)


@for_each(
    "change",
    [
        {"webhook-id": "msg_2"},
        {"webhook-timestamp": str(AT + 1)},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "v1,AAAA"},
        {"webhook-signature": "v1,not base64 \u00e9"},
        {"webhook-signature": "v2," + sign(KNOWN, "msg_1", AT, b"{}").removeprefix("v1,")},
        {"webhook-signature": sign(KNOWN, "msg_1", AT, b"{}").removeprefix("v1,")},
        {"webhook-signature": ""},
        {"webhook-id": ""},
        {"webhook-timestamp": "1614265330.0"},
        {"webhook-timestamp": "\u0661\u0662"},
        {"webhook-timestamp": "-5"},
    ],
)
def test_whatever_was_changed_is_not_trusted(change: dict[str, str]) -> None:
    with pytest.raises(BadSignature):
        verify(KNOWN, headers(KNOWN, b"{}") | change, b"{}", now=AT)


def test_another_body_is_not_trusted() -> None:
    with pytest.raises(BadSignature):
        verify(KNOWN, headers(KNOWN, b'{"amount":1}'), b'{"amount":9}', now=AT)


def test_an_unknown_kind_of_signature_beside_ours_does_not_disturb() -> None:
    found = headers(KNOWN, b"{}")
    found["webhook-signature"] = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw== " + found["webhook-signature"]
    assert verify(KNOWN, found, b"{}", now=AT) == "msg_1"


@pytest.mark.parametrize(("apart", "trusted"), [(300, True), (301, False), (-300, True), (-301, False)])
def test_an_attempt_is_trusted_for_five_minutes_around_its_time(apart: int, trusted: bool) -> None:
    found = headers(KNOWN, b"{}")
    if trusted:
        assert verify(KNOWN, found, b"{}", now=AT + apart) == "msg_1"
    else:
        with pytest.raises(BadSignature, match="300 s"):
            verify(KNOWN, found, b"{}", now=AT + apart)


@for_each(
    "secret",
    [
        "",
        "secret",
        "whsec_",
        "whsec_!!!!",
        "whsec_" + b64encode(b"x" * 23).decode(),
        "whsec_" + b64encode(b"x" * 65).decode(),
        [],
    ],
)
def test_a_secret_that_is_none_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(InvalidArgument, match="new_secret") as refused:
        sign(secret, "msg_1", AT, b"")
    assert "!!!!" not in str(refused.value)
    assert "eHh4" not in str(refused.value)  # the base64 of xxx


def test_a_parsed_body_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="raw body"):
        verify(KNOWN, headers(KNOWN, b"{}"), "{}", now=AT)  # type: ignore[arg-type]


def test_a_signed_request_is_not_valid_under_another_id() -> None:
    # Given a signed body that begins with a timestamp and a full stop
    body = b"%d.{}" % AT
    found = headers(KNOWN, body)
    assert verify(KNOWN, found, body, now=AT) == "msg_1"
    # When its beginning is moved into the id, the signed bytes are the same
    moved = found | {"webhook-id": f"msg_1.{AT}"}
    with pytest.raises(BadSignature, match="without full stops"):
        verify(KNOWN, moved, b"{}", now=AT)
    with pytest.raises(InvalidArgument, match="full stop"):
        sign(KNOWN, "msg.1", AT, b"{}")


@for_each(
    "id",
    ["\ud800", "msg\ud800_1", "m\u00fcg", "\u212a", "msg\n1", "msg\x001", "\x1b[31mmsg", "msg\x7f", "."],
)
def test_an_id_that_no_sender_uses_is_not_trusted(id: str) -> None:
    with pytest.raises(BadSignature, match="webhook-id"):
        verify(KNOWN, headers(KNOWN, b"{}") | {"webhook-id": id}, b"{}", now=AT)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_headers_may_be_bytes_as_those_of_asgi(wrap: Any) -> None:
    found = {name.encode(): wrap(value.encode()) for name, value in headers(KNOWN, b"{}").items()}
    assert verify(KNOWN, found, b"{}", now=AT) == "msg_1"
    with pytest.raises(BadSignature):
        verify(KNOWN, found | {b"webhook-id": wrap(b"\xff")}, b"{}", now=AT)
    mixed = {name: value.encode() for name, value in headers(KNOWN, b"{}").items()}
    assert verify(KNOWN, mixed, b"{}", now=AT) == "msg_1"  # type: ignore[arg-type]


@for_each("value", [None, 5, ["msg_1"], object()])
@for_each("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_header_of_another_type_is_not_trusted(name: str, value: Any) -> None:
    with pytest.raises(BadSignature, match=f"it has no {name}"):
        verify(KNOWN, headers(KNOWN, b"{}") | {name: value}, b"{}", now=AT)


@pytest.mark.parametrize("now", [float("nan"), float("inf"), float("-inf")])
def test_a_clock_that_tells_no_time_verifies_nothing(now: float) -> None:
    with pytest.raises(InvalidArgument, match="now"):
        verify(KNOWN, headers(KNOWN, b"{}"), b"{}", now=now)
