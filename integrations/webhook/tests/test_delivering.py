"""Attempts until it is accepted or given up, on a moved clock, against a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import tenacity
from idemgate_webhook import AddressRefused, Rejected, StandardWebhooks, Undelivered, Webhooks
from standardwebhooks.webhooks import Webhook

from idemgate import AlreadyInProgress, Gate
from idemgate.testing import Clock

pytestmark = pytest.mark.one_in(3)

PAUSES = [15, 15, 30, 180, 600, 1200, 1800, 3600, 10_800, 21_600, 86_400]
Respond = Callable[..., bytes]


async def wait_of(made: Any, clock: Clock) -> timedelta:
    """How long the only message has to wait now that its delivery has ended."""
    stats = await made.ended()
    assert stats.next_due is not None, "it is not scheduled"
    waiting: timedelta = stats.next_due - clock.now()
    return waiting


async def test_the_whole_schedule_to_the_dead_letters_and_back(
    gate: Gate, clock: Clock, receiver: Any, respond: Respond, sender: Any, secret: str
) -> None:
    # Given a receiver that is down
    receiver.answers = [respond("503 Service Unavailable", body=b"back in a year")]
    made, start = sender(), clock.now()
    async with gate.aio.worker():
        await made.send(receiver.url(), {"order": 7})
        # When the clock is moved from one attempt to the next
        requests, times = [await receiver.next()], [clock.now()]
        for pause in PAUSES:
            assert await wait_of(made, clock) == timedelta(seconds=pause)
            clock.advance(pause)
            requests.append(await receiver.next())
            times.append(clock.now())
        # Then it is a dead letter after twelve attempts, and says what the last answer was
        (letter,) = await made.dead()
        assert (letter.key, letter.attempts) == ("evt_1", 12)
        assert letter.reason == "idemgate_webhook.Undelivered: 503 Service Unavailable"
        # and its history has all of them
        history = await made.history()
        assert not history.delivered
        assert [attempt.number for attempt in history.attempts] == list(range(1, 13))
        assert [attempt.at for attempt in history.attempts] == times
        assert {(one.status, one.excerpt, one.error) for one in history.attempts} == {(503, "back in a year", "")}
        assert times[-1] - start == timedelta(seconds=sum(PAUSES))
        # and every request was the same message, signed at its own time
        for request, at in zip(requests, times, strict=True):
            assert (request.body, request.headers["webhook-id"]) == (b'{"order":7}', "evt_1")
            assert request.headers["idempotency-key"] == '"evt_1"'
            assert request.headers["webhook-timestamp"] == str(int(at.timestamp()))
            assert request.headers["webhook-signature"] == Webhook(secret).sign("evt_1", at, '{"order":7}')
            verified = StandardWebhooks(secret).verify(request.headers, request.body, at.timestamp())
            assert verified.id == "evt_1"
        # When it is sent back after the receiver was mended
        receiver.answers = [respond("204 No Content")]
        assert await made.topic.dead.redrive() == 1
        clock.advance("1ms")
        await receiver.next()
        await made.ended()
        # Then it is delivered, and the history goes on
        history = await made.history()
        assert history.delivered
        assert [(one.number, one.status) for one in history.attempts[-2:]] == [(12, 503), (1, 204)]


async def test_accepted_at_the_second_attempt_and_never_again(
    gate: Gate, clock: Clock, receiver: Any, respond: Respond, sender: Any
) -> None:
    receiver.answers = [respond("500 Oops"), respond("202 Accepted", body=b"thanks")]
    made = sender()
    async with gate.aio.worker():
        await made.send(receiver.url(), {})
        await made.ended()
        clock.advance("15s")
        stats = await made.ended()
        # Then nothing is left to do, and the same id is not sent again
        assert (stats.pending, stats["acked"]) == (0, 1)
        assert [(one.status, one.excerpt) for one in (await made.history()).attempts] == [(500, ""), (202, "thanks")]
        assert (await made.send(receiver.url(), {})).status == "duplicate"
        clock.advance("29d")
        assert (await made.send(receiver.url(), {})).status == "duplicate"
    assert receiver.requests.qsize() == 2


# -- Retry-After ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "waits"),
    [
        ("120", "120s"), ("0", "15s"), ("5", "15s"), ("999999999", "24h"), ("soon", "15s"), ("-5", "15s"),
        ("1e3", "15s"), ("", "15s"), ("99999999999999999999", "15s"), ("Fri, 99 Foo 2023 25:00:00 GMT", "15s"),
    ],
)  # fmt: skip
async def test_retry_after_lengthens_a_pause_up_to_a_bound(
    clock: Clock, receiver: Any, respond: Respond, sender: Any, value: str, waits: str, gate: Gate
) -> None:
    receiver.answers = [respond("503 Service Unavailable", f"Retry-After: {value}")]
    made, seconds = sender(), {"120s": 120, "15s": 15, "24h": 86_400}
    async with gate.aio.worker():
        await made.send(receiver.url(), {})
        await receiver.next()
        assert await wait_of(made, clock) == timedelta(seconds=seconds[waits])


@pytest.mark.parametrize(("ahead", "waits"), [(90, 90), (-90, 15), (10**7, 3600)])
async def test_retry_after_may_be_a_date(
    clock: Clock, receiver: Any, respond: Respond, sender: Any, ahead: int, waits: int, gate: Gate
) -> None:
    date = format_datetime(clock.now() + timedelta(seconds=ahead), usegmt=True)
    receiver.answers = [respond("429 Too Many Requests", f"Retry-After: {date}")]
    made = sender(max_retry_after="1h")
    async with gate.aio.worker():
        await made.send(receiver.url(), {})
        await receiver.next()
        assert await wait_of(made, clock) == timedelta(seconds=waits)


async def test_a_wait_strategy_of_tenacity_sees_the_attempt(
    clock: Clock, receiver: Any, respond: Respond, sender: Any, gate: Gate
) -> None:
    class Wait(tenacity.wait.wait_base):
        def __call__(self, retry_state: tenacity.RetryCallState) -> float:
            assert retry_state.outcome is not None
            error = retry_state.outcome.exception()
            assert isinstance(error, Undelivered)
            return retry_state.attempt_number * 1000 + (error.attempt.status or 0)

    receiver.answers = [respond("500 Oops"), respond("502 Bad Gateway", "Retry-After: 7000"), respond("500 Oops")]
    made = sender(schedule=Wait(), max_attempts=3)
    async with gate.aio.worker():
        await made.send(receiver.url(), {})
        assert (await receiver.next()) is not None
        assert await wait_of(made, clock) == timedelta(seconds=1500)
        clock.advance("1500s")
        await receiver.next()
        assert await wait_of(made, clock) == timedelta(seconds=7000)
        clock.advance("7000s")
        await receiver.next()
        assert (await made.dead())[0].attempts == 3


# -- statuses ---------------------------------------------------------------------------------------------------------


async def test_gone_is_given_up_at_once(gate: Gate, receiver: Any, respond: Respond, sender: Any) -> None:
    receiver.answers = [respond("410 Gone", "Retry-After: 5")]
    made = sender()
    async with gate.aio.worker():
        await made.send(receiver.url(), {})
        (letter,) = await made.dead()
    assert (letter.reason, letter.attempts) == ("idemgate_webhook.Rejected: 410 Gone", 1)
    assert [one.status for one in (await made.history()).attempts] == [410]


@pytest.mark.parametrize("status", ["302 Found", "400 Bad Request", "404 Not Found", "500 Oops", "599 Whatever"])
async def test_every_other_answer_is_tried_again(receiver: Any, respond: Respond, sender: Any, status: str) -> None:
    receiver.answers = [respond(status)]
    made = sender()
    await made.send(receiver.url(), {})
    error = await made.attempt()
    assert isinstance(error, Undelivered)
    assert (error.attempt.status, error.delay) == (int(status[:3]), None)
    assert str(error).startswith(status[:3])


async def test_which_statuses_end_it_is_yours_to_say(receiver: Any, respond: Respond, sender: Any) -> None:
    receiver.answers = [respond("409 Conflict"), respond("404 Not Found"), respond("200 OK")]
    made = sender(success={409}, give_up={404})
    for number in range(3):
        await made.send(receiver.url(), {}, id=f"evt_{number}")
    errors = [type(await made.attempt()) for _ in range(3)]
    assert errors == [type(None), Rejected, Undelivered]


async def test_a_redirect_is_not_followed(listen: Any, receiver: Any, respond: Respond, sender: Any) -> None:
    async with listen() as other:
        receiver.answers = [respond("308 Permanent Redirect", f"Location: {other.url()}")]
        made = sender()
        await made.send(receiver.url(), {})
        error = await made.attempt()
        assert str(error) == "308 Permanent Redirect (redirects are not followed)"
        assert other.connections == 0


# -- no answer --------------------------------------------------------------------------------------------------------


async def test_a_receiver_that_never_answers_costs_no_more_than_the_timeout(receiver: Any, sender: Any) -> None:
    held = asyncio.Event()

    async def never(_: asyncio.StreamWriter) -> None:
        await held.wait()

    receiver.answers = [never]
    made = sender(timeout="200ms")
    await made.send(receiver.url(), {})
    error = await made.attempt()
    held.set()
    assert isinstance(error, Undelivered)
    assert (error.attempt.status, error.attempt.error) == (None, "TimeoutError")
    assert error.attempt.ms >= 200


async def test_the_timeout_is_for_all_of_it_however_slowly_it_drips(receiver: Any, sender: Any) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        while True:  # a header that never ends: each byte comes well in time
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    receiver.answers = [drip]
    made = sender(timeout="200ms")
    await made.send(receiver.url(), {})
    error = await made.attempt()
    assert isinstance(error, Undelivered)
    assert (error.attempt.status, error.attempt.error) == (None, "TimeoutError")


async def test_once_the_status_is_known_the_body_cannot_change_it(receiver: Any, sender: Any) -> None:
    held = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nstart")
        await writer.drain()
        await held.wait()

    receiver.answers = [slow]
    made = sender(timeout="1s")
    await made.send(receiver.url(), {})
    assert await made.attempt() is None
    held.set()
    history = await made.history()
    assert history.delivered
    assert (history.attempts[0].status, history.attempts[0].error) == (200, "")


async def test_a_huge_answer_is_read_no_further_than_its_excerpt(receiver: Any, sender: Any) -> None:
    written = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()
            written += 65_536

    receiver.answers = [flood]
    made = sender(excerpt=100)
    await made.send(receiver.url(), {})
    assert await made.attempt() is None
    assert (await made.history()).attempts[0].excerpt == "x" * 100
    assert written < 50_000_000


async def test_no_excerpt_is_kept_if_none_is_wanted(receiver: Any, respond: Respond, sender: Any) -> None:
    receiver.answers = [respond("200 OK", body=b"hello")]
    made = sender(excerpt=0)
    await made.send(receiver.url(), {})
    assert await made.attempt() is None
    assert (await made.history()).attempts[0].excerpt == ""


@pytest.mark.parametrize("junk", [b"", b"\x00\xff\x00", b"SSH-2.0-secret\r\n\r\n"])
async def test_an_answer_that_is_no_http_is_a_failure_without_its_words(
    receiver: Any, sender: Any, junk: bytes
) -> None:
    receiver.answers = [junk]
    made = sender()
    await made.send(receiver.url(), {})
    error = await made.attempt()
    assert isinstance(error, Undelivered)
    assert (error.attempt.status, str(error)) == (None, "RemoteProtocolError")


async def test_a_closed_port_is_a_failure_that_is_tried_again(listen: Any, sender: Any) -> None:
    async with listen() as gone:
        url = gone.url()
    made = sender()
    await made.send(url, {})
    error = await made.attempt()
    assert isinstance(error, Undelivered)
    assert "ConnectError" in error.attempt.error


async def test_a_name_of_a_private_address_is_a_dead_letter_at_once(gate: Gate, receiver: Any, secret: str) -> None:
    # Given webhooks that may reach public addresses only
    webhooks = Webhooks(gate, secret=secret, https_only=False)
    async with gate.aio.worker():
        # When one is sent to a name that stands for this machine
        await webhooks.aio.send("evt_1", receiver.url(host="localhost"), {})
        async with asyncio.timeout(20):
            while not (letters := await webhooks.topic.aio.dead.list()):
                await asyncio.sleep(0.005)
    # Then nothing was connected, and the dead letter says why
    assert receiver.connections == 0
    assert letters[0].reason.startswith("idemgate_webhook.Rejected: AddressRefused: localhost: ")
    assert AddressRefused.__name__ in (await webhooks.aio.history("evt_1")).attempts[0].error


# -- duplicates and deaths --------------------------------------------------------------------------------------------


async def test_a_worker_that_died_after_the_record_does_not_send_again(
    clock: Clock, receiver: Any, sender: Any
) -> None:
    # Given a delivery that was accepted and never acknowledged
    made = sender()
    await made.send(receiver.url(), {})
    assert await made.attempt() is None
    # When its lease lapses and another takes it
    clock.advance("31s")
    (delivery,) = await made.topic.take()
    await made.webhooks.deliver(delivery)
    # Then nothing was sent
    assert delivery.attempt == 2
    assert await made.topic.ack(delivery) == "ok"
    assert receiver.requests.qsize() == 1


async def test_an_attempt_that_was_cancelled_leaves_the_way_free(clock: Clock, receiver: Any, sender: Any) -> None:
    held = asyncio.Event()

    async def hold(_: asyncio.StreamWriter) -> None:
        await held.wait()

    receiver.answers = [hold, *receiver.answers]
    made = sender()
    await made.send(receiver.url(), {})
    (delivery,) = await made.topic.take()
    task = asyncio.create_task(made.webhooks.deliver(delivery))
    first = await receiver.next()
    # While it lasts, nobody else sends the same
    with pytest.raises(AlreadyInProgress) as busy:
        await made.webhooks.deliver(delivery)
    assert 0 < busy.value.retry_after <= 30
    # When it is cancelled
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.set()
    await made.webhooks.deliver(delivery)
    # Then the next one sends the same message again
    again = await receiver.next()
    assert (again.body, again.headers["webhook-id"]) == (first.body, first.headers["webhook-id"])
    assert (await made.history()).delivered


async def test_what_was_sent_first_is_what_goes_out_even_when_its_id_was_forgotten(
    gate: Gate, clock: Clock, receiver: Any, respond: Respond, sender: Any
) -> None:
    # Given a message that waits for longer than its id is remembered
    receiver.answers = [respond("500 Oops"), respond("200 OK")]
    made = sender(schedule=["1h"], retention="1m")
    async with gate.aio.worker():
        await made.send(receiver.url(), {"body": 1})
        await receiver.next()
        due = clock.now() + await wait_of(made, clock)
        # When the same id is sent with another body
        clock.advance("2m")
        receipt = await made.send(receiver.url(), {"body": 2})
        # Then it joins the one that waits, which changes neither its body nor its time
        assert (receipt.status, receipt.due_at) == ("merged", due)
        clock.set(due.timestamp())
        assert (await receiver.next()).body == b'{"body":1}'
        await made.ended()
    assert receiver.requests.empty()


async def test_the_history_keeps_the_newest_and_goes_with_its_retention(
    clock: Clock, receiver: Any, respond: Respond, sender: Any, gate: Gate
) -> None:
    receiver.answers = [respond("500 Oops")]
    made = sender(schedule="1s", max_attempts=40, retention="1h")
    async with gate.aio.worker():
        await made.send(receiver.url(), {})
        for _ in range(39):
            await receiver.next()
            await made.ended()
            clock.advance("1s")
        await receiver.next()
        await made.dead()
    assert [one.number for one in (await made.history()).attempts] == list(range(9, 41))
    clock.advance("1h")
    assert (await made.history()).attempts == ()


async def test_an_id_that_is_not_known_has_no_history(sender: Any) -> None:
    history = await sender().history("evt_9")
    assert (history.id, history.delivered, history.attempts) == ("evt_9", False, ())


async def test_two_kinds_of_webhooks_do_not_know_each_others_ids(receiver: Any, sender: Any) -> None:
    orders, users = sender(name="orders"), sender(name="users")
    for made in (orders, users):
        assert (await made.send(receiver.url(), {})).status == "scheduled"
        assert await made.attempt() is None
    assert receiver.requests.qsize() == 2


async def test_nothing_that_is_confidential_is_logged(
    gate: Gate,
    clock: Clock,
    receiver: Any,
    respond: Respond,
    sender: Any,
    secret: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given all loggers at their most talkative, and a receiver that repeats what it got
    caplog.set_level(logging.DEBUG)
    receiver.answers = [
        respond("500 in-its-head", body=b"you sent card-4242"),
        b"in-its-head is no HTTP\r\n\r\n",
        respond("410 Gone", body=b"card-4242"),
    ]
    made = sender()
    async with gate.aio.worker():
        await made.send(receiver.url("/hooks?token=card-4242"), {"number": "card-4242"})
        for _ in range(2):
            await receiver.next()
            await made.ended()
            clock.advance("15s")
        letters = await made.dead()
    # Then what was sent, the body that came back, the URL and the secret are in none of their lines
    lines = [(one.name, logging.Formatter().format(one) + repr(vars(one))) for one in caplog.records]
    assert any("worker.handler_failed" in line for _, line in lines)
    for word in ("card-4242", secret, secret.removeprefix("whsec_")):
        assert [line for _, line in lines if word in line] == []
    # and no record of idemgate has the head that came back (httpcore's debug lines have it), and no reason has it
    assert [name for name, line in lines if "in-its-head" in line and not name.startswith("httpcore")] == []
    failures = [one.error for one in (await made.history()).attempts]
    assert failures == ["", "RemoteProtocolError", ""]
    assert letters[0].reason == "idemgate_webhook.Rejected: 410 Gone"


def test_dates_of_retry_after_are_read_in_all_their_forms() -> None:
    from idemgate_webhook.answers import retry_after

    now = datetime(1994, 11, 6, 8, 49, 7, tzinfo=UTC).timestamp()
    for date in ("Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"):
        assert retry_after(date, now) == 30
