"""`send`: what is refused before anything is written, and what is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from idemgate_webhook import SCHEDULE, Guarded, Webhooks
from standardwebhooks.webhooks import Webhook

from idemgate import Gate, InvalidArgument
from idemgate.testing import Clock
from tests.for_each import for_each


@pytest.mark.parametrize("id", ["", "a.b", 'a"b', "a b", "a\\b", "a\nb", "\u00e9", "x" * 201, 7, None])
async def test_an_id_that_would_not_stand_in_a_header_or_a_signature_is_refused(sender: Any, id: Any) -> None:
    made = sender()
    with pytest.raises(InvalidArgument, match="id="):
        await made.send("http://127.0.0.1/", id=id)
    assert (await made.topic.stats()).counters == {}


@for_each(
    ("url", "problem"),
    [
        ("", "absolute"), ("example.com/hooks", "absolute"), ("/hooks", "absolute"), ("https://", "absolute"),
        ("ftp://example.com/", "scheme"), ("file:///etc/passwd", "scheme"), ("http://example.com/", "https_only"),
        ("https://me:hidden@example.com/", "credentials"), ("https://example.com:99999/", "port"),
        ("https://exa mple.com\x00/", "not a URL"), (None, "not a URL"),
        ("https://127.0.0.1/", "not a public"), ("https://[::1]/?token=hidden", "not a public"),
        ("https://2130706433/", "not a public"), ("https://0x7f.1/", "not a public"), ("https://10.1/", "not a public"),
        ("https://[::ffff:169.254.169.254]/", "not a public"),
    ],
)  # fmt: skip
async def test_a_url_that_can_never_work_is_refused(gate: Gate, secret: str, url: Any, problem: str) -> None:
    webhooks = Webhooks(gate, secret=secret, name=f"webhooks{len(gate.topics)}")
    with pytest.raises(InvalidArgument, match=problem) as refused:
        webhooks.send("evt_1", url, {})
    assert "hidden" not in str(refused.value)
    assert webhooks.topic.stats().counters == {}


@pytest.mark.parametrize("body", [object(), float("nan"), {1, 2}, {"a": b"x"}, "\ud800"])
async def test_a_body_that_is_not_json_is_refused(sender: Any, receiver: Any, body: object) -> None:
    with pytest.raises(InvalidArgument, match="body="):
        await sender().send(receiver.url(), body)


@for_each(
    "options",
    [
        {"secret": "hunter2"}, {"secret": []}, {"schedule": []}, {"schedule": ["soon"]}, {"timeout": 0},
        {"max_attempts": -1}, {"excerpt": -1}, {"excerpt": 10**6}, {"allow": ["private"]}, {"allow": "10.0.0.0/8"},
        {"transport": Guarded(), "allow": ["127.0.0.1"]}, {"max_retry_after": "-1s"}, {"name": "web hooks"},
    ],
)  # fmt: skip
async def test_options_that_make_no_sense_are_refused(gate: Gate, secret: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Webhooks(gate, **{"secret": secret, **options})
    assert "hunter2" not in str(refused.value)


async def test_what_arrives_is_what_the_specification_says(
    receiver: Any, sender: Any, secret: str, clock: Clock
) -> None:
    # Given a clock that shows the time of day, as the reference verifies by it
    clock.set(int(time.time()))
    made = sender()
    # When a webhook is sent and delivered
    await made.send(receiver.url("/in?who=acme"), {"type": "order.paid", "name": "Zo\u00eb"})
    assert await made.attempt() is None
    # Then the reference accepts it
    request = await receiver.next()
    assert request.path == "/in?who=acme"
    assert request.body == '{"type":"order.paid","name":"Zo\u00eb"}'.encode()
    assert Webhook(secret).verify(request.body, request.headers) == {"type": "order.paid", "name": "Zo\u00eb"}
    assert request.headers["webhook-id"] == "evt_1"
    assert request.headers["idempotency-key"] == '"evt_1"'
    assert request.headers["webhook-timestamp"] == str(int(clock.now().timestamp()))
    assert request.headers["content-type"] == "application/json"
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["user-agent"] == "idemgate-webhook"


async def test_bytes_are_sent_as_they_are(receiver: Any, sender: Any) -> None:
    made = sender()
    await made.send(receiver.url(), b'{ "a" : 1.0 }')
    assert await made.attempt() is None
    assert (await receiver.next()).body == b'{ "a" : 1.0 }'


async def test_while_a_secret_is_rotated_both_verify(receiver: Any, sender: Any, secret: str, clock: Clock) -> None:
    clock.set(int(time.time()))
    old = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    made = sender(secret=[secret, old])
    await made.send(receiver.url(), {"a": 1})
    await made.attempt()
    request = await receiver.next()
    assert Webhook(secret).verify(request.body, request.headers) == {"a": 1}
    assert Webhook(old).verify(request.body, request.headers) == {"a": 1}


@pytest.mark.parametrize("awaiting", [False, True])
async def test_each_owner_has_a_secret_that_is_asked_at_each_attempt(
    receiver: Any, sender: Any, secret: str, clock: Clock, awaiting: bool
) -> None:
    # Given a callable that knows the secrets of owners
    clock.set(int(time.time()))
    known = {"acme": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}

    async def later(owner: str) -> str:
        return known[owner]

    made = sender(secret=later if awaiting else known.__getitem__)
    await made.send(receiver.url(), {}, owner="acme")
    # When the secret changes before the attempt
    known["acme"] = secret
    assert await made.attempt() is None
    # Then it is the new one that signed, and none is in the store
    request = await receiver.next()
    assert Webhook(secret).verify(request.body, request.headers) == {}


async def test_the_blocking_face(receiver: Any, sender: Any) -> None:
    webhooks = sender().webhooks
    assert webhooks.send("evt_1", receiver.url(), {}).status == "scheduled"
    assert webhooks.send("evt_1", receiver.url(), {"other": 1}).status == "duplicate"
    assert webhooks.history("evt_1").attempts == ()
    assert "webhooks" in repr(webhooks)


async def test_a_delay_and_a_time(receiver: Any, sender: Any, clock: Clock) -> None:
    made = sender()
    first = await made.send(receiver.url(), {}, delay="1m")
    second = await made.send(receiver.url(), {}, id="evt_2", at=clock.now() + timedelta(hours=1))
    assert [one.due_at - clock.now() for one in (first, second)] == [timedelta(minutes=1), timedelta(hours=1)]


async def test_a_transport_of_the_users_own_is_used_and_not_second_guessed(sender: Any) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    made = sender(transport=httpx.MockTransport(answer))
    await made.send("http://10.0.0.1/internal", {})
    assert await made.attempt() is None
    assert [str(request.url) for request in seen] == ["http://10.0.0.1/internal"]


def test_the_schedule_is_the_one_that_is_promised() -> None:
    seconds = [15, 15, 30, 180, 600, 1200, 1800, 3600, 10_800, 21_600, 86_400]
    units: dict[str, Callable[[int], int]] = {"s": lambda n: n, "m": lambda n: n * 60, "h": lambda n: n * 3600}
    assert [units[str(one)[-1]](int(str(one)[:-1])) for one in SCHEDULE] == seconds
