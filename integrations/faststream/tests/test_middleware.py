"""The middleware on the test brokers of FastStream: ids, policies, and what a handler raises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.exceptions import AckMessage, HandlerException, NackMessage, RejectMessage, StopConsume
from faststream.message.message import AckStatus
from faststream.nats import NatsMessage
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from faststream.redis import ListSub, RedisBroker, StreamSub, TestRedisBroker
from idemgate_faststream import Once

from idemgate import Bury, Gate, InvalidArgument, Retry
from idemgate.guard import call
from idemgate.guard.call import wait_for_owner_async
from integrations.faststream.tests.apps import HEADER, KINDS, App, settled
from tests.for_each import for_each


async def forget_id(message: Any, parse: Callable[[Any], Awaitable[Any]]) -> Any:
    """Parse what a publisher sent without an id: the test broker of RabbitMQ adds one."""
    object.__setattr__(message, "message_id", None)
    return await parse(message)


# -- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["{message.message_id}", "order-{message.message_id}", lambda m: m.message_id])
async def test_an_id_that_faststream_made_up_is_refused(kind: str, key: Any, gate: Gate) -> None:
    runs: list[str] = []
    refused: list[Exception] = []
    app = App(kind, Once(gate, key=key, scope="ids", on_reject=lambda _, error: refused.append(error)))

    @app.subscriber(**({"parser": forget_id} if kind == "rabbit" else {}))
    async def on_message(message: str) -> None:
        runs.append(message)

    # When a publisher sets no id of the message
    async with app.running():
        await app.publish()
    # Then the message does not run, and the error says what to use instead
    (error,) = refused
    assert isinstance(error, InvalidArgument)
    assert 'key="{message.headers[event-id]}"' in str(error)
    assert (runs, settled(gate)) == ([], {"rejected": 1})


@for_each(
    ("kind", "options"),
    [
        ("nats", {"headers": {"message_id": "m1"}}),
        ("rabbit", {"message_id": "m1"}),
        ("redis", {"headers": {"message_id": "m1"}}),
    ],
)
async def test_an_id_that_the_publisher_set_is_a_key(kind: str, options: dict[str, Any], gate: Gate) -> None:
    runs: list[str] = []
    app = App(kind, Once(gate, key="{message.message_id}", scope=f"given-{kind}"))

    @app.subscriber
    async def on_message(message: str) -> None:
        runs.append(message)

    async with app.running():
        for _ in range(2):
            await app.publish(
                **{name: {**value} if isinstance(value, dict) else value for name, value in options.items()}
            )
    assert runs == ["x"]
    assert (await gate.aio.inspect("m1", scope=f"given-{kind}")).state == "done"


async def test_each_subscriber_has_its_own_scope_or_shares_one(gate: Gate) -> None:
    runs: list[str] = []
    own, shared = (Once(gate, key=HEADER, scope=scope) for scope in (None, "shared"))
    for once in (own, shared):
        app = App("rabbit", once)
        other = app.router.subscriber("s2")

        async def bill(message: str) -> None:
            runs.append("bill")

        async def ship(message: str) -> None:
            runs.append("ship")

        bill.__qualname__, ship.__qualname__ = "bill", "ship"
        app.subscriber(bill)
        other(ship)
        async with app.running():
            for queue in ("s", "s2", "s", "s2"):
                await app.broker.publish("x", queue, headers={"event-id": "e1"})
        # Then each of two handlers runs a message once, or one of them for both
        assert sorted(runs) == (["bill", "ship"] if once is own else runs[:1])
        assert len(runs) == (2 if once is own else 1)
        runs.clear()


# -- policies ---------------------------------------------------------------------------------------------------------


@for_each(
    ("kind", "options", "said"),
    [
        ("kafka", {"ack_policy": AckPolicy.ACK_FIRST}, "acknowledged before the handler"),
        ("rabbit", {"ack_policy": AckPolicy.ACK_FIRST}, "acknowledged before the handler"),
        ("nats", {"ack_policy": AckPolicy.MANUAL}, "would not acknowledge a duplicate"),
        ("rabbit", {"ack_policy": AckPolicy.MANUAL}, "would not acknowledge a duplicate"),
        ("redis", {"ack_policy": AckPolicy.MANUAL}, "would not acknowledge a duplicate"),
        ("nats", {"stream": None}, "once at most"),
        ("redis", {"stream": StreamSub("s")}, "needs a group"),
        ("redis", {"stream": StreamSub("s", group="g", consumer="c", no_ack=True)}, "without no_ack"),
        ("kafka", {"batch": True}, "many messages"),
        ("redis", {"stream": StreamSub("s", group="g", consumer="c", batch=True)}, "many messages"),
    ],
)
async def test_what_the_guard_cannot_settle_is_refused_and_stays_with_the_broker(
    kind: str, options: dict[str, Any], said: str, gate: Gate
) -> None:
    app = App(kind, Once(gate, key=HEADER, scope="policies"), **options)

    @app.subscriber
    async def on_message(message: Any) -> None:
        raise AssertionError("it ran")

    async with app.running():
        with pytest.raises(InvalidArgument, match=said):
            await app.publish()
    (message,) = app.messages
    assert message.committed in (None, AckStatus.ACKED)  # of Kafka with ACK_FIRST
    assert settled(gate) == {}


async def test_a_list_of_redis_is_refused(gate: Gate) -> None:
    broker = RedisBroker(middlewares=[Once(gate, key=HEADER, scope="policies")], logger=None)

    @broker.subscriber(list=ListSub("s"))
    async def on_message(message: Any) -> None:
        raise AssertionError("it ran")

    async with TestRedisBroker(broker):
        with pytest.raises(InvalidArgument, match="once at most"):
            await broker.publish("x", list="s", headers={"event-id": "e1"})


@for_each("policy", [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.NACK_ON_ERROR])
async def test_the_verdict_decides_whatever_the_policy(policy: AckPolicy, gate: Gate) -> None:
    failures = [ValueError("once")]
    app = App("rabbit", Once(gate, key=HEADER, scope=f"policy-{policy}", backoff=["1ms", "2ms"]), ack_policy=policy)

    @app.subscriber
    async def on_message(message: Any) -> None:
        if failures:
            raise failures.pop()

    async with app.running():
        for _ in range(3):
            await app.publish()
    assert [type(one) for one in app.raised] == [NackMessage]
    assert (settled(gate)["handled"], settled(gate)["duplicate"]) == (gate.counters["consumer.failed"],) * 2


# -- errors -----------------------------------------------------------------------------------------------------------


@for_each(
    ("kind", "error", "raised", "counted", "state", "is_kept"),
    [
        ("nats", ValueError("no"), NackMessage(delay=2.0), "failed", "released", False),
        ("nats", asyncio.CancelledError(), NackMessage(delay=2.0), "failed", "released", False),
        ("nats", Retry(delay="7s"), NackMessage(delay=7.0), "failed", "released", False),
        ("nats", Bury("no"), RejectMessage(), "rejected", "released", True),
        ("redis", Bury("no"), AckMessage(), "rejected", "released", True),
        ("redis", ValueError("no"), NackMessage(), "failed", "released", False),
        # What a handler tells FastStream
        ("nats", AckMessage(), AckMessage(), "handled", "done", False),
        ("nats", NackMessage(delay=9), NackMessage(delay=9), "failed", "released", False),
        ("nats", RejectMessage(), RejectMessage(), "rejected", "released", True),
        ("redis", RejectMessage(), AckMessage(), "rejected", "released", True),
        ("rabbit", RejectMessage(requeue=True), RejectMessage(requeue=True), "failed", "released", False),
    ],
)
async def test_what_a_handler_raises_decides_about_key_and_message(
    kind: str, error: BaseException, raised: HandlerException, counted: str, state: str, is_kept: bool, gate: Gate
) -> None:
    kept: list[Exception] = []
    scope = f"{kind}-{error!r}-{state}"
    app = App(kind, Once(gate, key=HEADER, scope=scope, backoff=2, on_reject=lambda _, error: kept.append(error)))
    before = settled(gate).get(counted, 0)

    @app.subscriber
    async def on_message(message: str) -> None:
        raise error

    async with app.running():
        await app.publish()
    (told,) = app.raised
    assert (type(told), vars(told)) == (type(raised), vars(raised))
    assert settled(gate)[counted] == before + 1
    assert (await gate.aio.inspect("e1", scope=scope)).state == state
    assert kept == ([error] if is_kept else [])


async def test_the_last_attempt_is_rejected_with_its_error(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Exception] = []

    async def on_reject(_: Any, error: Exception) -> None:
        kept.append(error)

    app = App("nats", Once(gate, key=HEADER, scope="last", backoff="1s", max_attempts=2, on_reject=on_reject))

    @app.subscriber
    async def on_message(message: str) -> None:
        raise ValueError("no")

    async with app.running():
        await app.publish()
        await app.publish()
    assert [type(one) for one in app.raised] == [NackMessage, RejectMessage]
    assert [repr(one.__cause__) for one in kept] == ["ValueError('no')"]
    levels = [(one.levelno, one.getMessage().split()[0]) for one in caplog.records if one.name == "idemgate.once"]
    assert levels == [(logging.WARNING, "consumer.failed"), (logging.ERROR, "consumer.rejected")]


async def test_a_rejected_message_that_could_not_be_kept_is_given_back(gate: Gate) -> None:
    failures: list[Exception] = [ConnectionError("no queue")]
    kept: list[Any] = []

    def on_reject(message: Any, _: Exception) -> None:
        if failures:
            raise failures.pop()
        kept.append(message.body)

    app = App("nats", Once(gate, key=HEADER, scope="keep", backoff="3s", on_reject=on_reject))

    @app.subscriber
    async def on_message(message: str) -> None:
        raise Bury("no")

    async with app.running():
        await app.publish()
        await app.publish()
    assert [(type(one), vars(one)["extra_options"]) for one in app.raised] == [
        (NackMessage, {"delay": 3.0}),
        (RejectMessage, {}),
    ]
    assert kept == [b"x"]
    assert settled(gate) == {"failed": 1, "rejected": 1}


async def test_stop_consume_goes_on_to_faststream(gate: Gate) -> None:
    app = App("nats", Once(gate, key=HEADER, scope="stop"))

    @app.subscriber
    async def on_message(message: str) -> None:
        raise StopConsume

    async with app.running():
        with pytest.raises(StopConsume):
            await app.publish()
    (message,) = app.messages
    assert message.committed is AckStatus.NACKED  # and is not rejected by the policy
    assert settled(gate) == {"failed": 1}


# -- in progress ------------------------------------------------------------------------------------------------------


@for_each(("kind", "delays"), [("nats", True), ("kafka", False), ("rabbit", False), ("redis", False)])
async def test_a_message_in_progress_elsewhere_returns_later(kind: str, delays: bool, gate: Gate) -> None:
    scope = f"busy-{kind}"
    app = App(kind, Once(gate, key=HEADER, scope=scope, hold="200ms", fingerprint=lambda message: "any"))

    @app.subscriber
    async def on_message(message: str) -> None:
        raise AssertionError("it ran")

    # While another owner runs the message
    owner = await gate.aio.claim("e1", scope=scope, fingerprint="any", lease="10s")
    async with app.running():
        began = asyncio.get_running_loop().time()
        await app.publish()
        waited = asyncio.get_running_loop().time() - began
        # NATS gets it back with a delay; the others keep it in the consumer for `hold`
        (told,) = app.raised
        assert isinstance(told, NackMessage)
        assert ("delay" in told.extra_options) is delays
        assert waited >= (0 if delays else 0.2)
    await owner.release()


@for_each("kind", ["kafka", "rabbit", "redis"])
async def test_a_held_message_is_acknowledged_when_the_other_run_completes(
    kind: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = asyncio.Event()

    def wait_for_owner(*args: Any) -> Any:
        holds.set()
        return wait_for_owner_async(*args)

    monkeypatch.setattr(call, "wait_for_owner_async", wait_for_owner)
    scope = f"held-{kind}"
    app = App(kind, Once(gate, key=HEADER, scope=scope, hold="20s", fingerprint=lambda message: "any"))
    before = settled(gate).get("duplicate", 0)

    @app.subscriber
    async def on_message(message: str) -> None:
        raise AssertionError("it ran")

    owner = await gate.aio.claim("e1", scope=scope, fingerprint="any", lease="10s")
    async with app.running():
        publishing = asyncio.create_task(app.publish())
        await asyncio.wait_for(holds.wait(), 60)
        await owner.complete()
        await publishing
    assert settled(gate)["duplicate"] == before + 1


async def test_a_store_that_is_away_gives_the_message_back(namespace: str) -> None:
    away = Gate("redis://127.0.0.1:1/0", namespace=namespace, timeout="100ms")
    app = App("nats", Once(away, key=HEADER, scope="away", backoff="4s"))

    @app.subscriber
    async def on_message(message: str) -> None:
        raise AssertionError("it ran")

    async with app.running():
        await app.publish()
    (told,) = app.raised
    assert isinstance(told, NackMessage)
    assert told.extra_options == {"delay": 4.0}
    await away.aio.close()
    away.close()


async def test_a_settlement_that_the_broker_refuses_is_counted(gate: Gate) -> None:
    app = App("nats", Once(gate, key=HEADER, scope="refused"))

    async def refuse() -> None:
        raise ConnectionError("the broker is away")

    @app.subscriber
    async def on_message(message: NatsMessage) -> None:
        message.raw_message.ack = refuse

    async with app.running():
        await app.publish()
    assert settled(gate) == {"unsettled": 1}


@for_each(
    ("options", "named"),
    [
        ({"key": 3}, "key"),
        ({"key": "{a}{b}"}, "key"),
        ({"backoff": "soon"}, "backoff"),
        ({"hold": 0}, "hold"),
        ({"key": "{message.id}"}, "key"),
        ({"on_reject": "log"}, "on_reject"),
        ({"on_reject": lambda message: None}, "on_reject"),
        ({"lease": "0s"}, "lease"),
        ({"scope": ""}, "scope"),
    ],
)
def test_invalid_options_are_refused_at_once(options: dict[str, Any], named: str, gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{named}"):
        Once(gate, **{"key": HEADER, **options})


async def test_the_class_in_the_place_of_its_object_is_refused() -> None:
    broker = RabbitBroker(middlewares=[Once], logger=None)  # type: ignore[list-item]
    async with TestRabbitBroker(broker):
        with pytest.raises(InvalidArgument, match=r"Pass \[Once\(gate, key=...\)\]"):
            await broker.publish("x", "s")


async def test_a_handler_without_a_unique_name_needs_a_scope(gate: Gate) -> None:
    app = App("nats", Once(gate, key=HEADER))
    app.subscriber(lambda: None)
    async with app.running():
        with pytest.raises(InvalidArgument, match="scope"):
            await app.publish()
