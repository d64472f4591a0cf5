"""Replies on the test brokers of FastStream: a duplicate publishes that of the first run again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import ip_address
from typing import Any
from uuid import UUID

import pytest
from faststream import AckPolicy, BaseMiddleware, Context, Response
from faststream.exceptions import AckMessage, NackMessage, RejectMessage
from faststream.kafka import KafkaResponse
from faststream.nats import NatsBroker, NatsMessage, NatsResponse
from faststream.nats.schemas.schedule import Schedule
from faststream.rabbit import RabbitResponse
from faststream.redis import RedisResponse
from idemgate_faststream import Once
from idemgate_faststream.responses import pack_reply, unpack_reply
from pydantic import BaseModel, Field, RootModel, SecretStr, computed_field, field_serializer, model_serializer
from pydantic_core import PydanticSerializationError

from idemgate import Gate
from integrations.faststream.tests.apps import HEADER, KINDS, App, settled
from tests.for_each import for_each


class Invoice(BaseModel):
    total: int


class User(BaseModel):
    name: str = Field(alias="Name")
    card: str = "4111111111111111"
    password: str = Field("hunter2", exclude=True)
    token: SecretStr = SecretStr("hunter2")
    since: datetime = datetime(2026, 1, 1)  # noqa: DTZ001 - models have such ones

    @field_serializer("card")
    def mask(self, card: str) -> str:
        return "****" + card[-4:]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def initial(self) -> str:
        return self.name[0]


class Numbers(RootModel[list[int]]):
    pass


class Public(BaseModel):
    secret: int

    @model_serializer
    def show(self) -> dict[str, int]:
        return {"public": 1}


@dataclass
class Price:
    amount: Decimal


class Color(Enum):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


class Text(str):
    __slots__ = ()


class Wrapped(Response):
    """A response that makes its body from its argument."""

    def __init__(self, data: str) -> None:
        super().__init__({"data": data})


class Titled(Response):
    """A response that needs more than a body."""

    def __init__(self, body: str, title: str) -> None:
        super().__init__(body, headers={"title": title})


ANN = User(Name="ann")


@for_each(
    "reply",
    [
        "text",
        {"total": 3},
        Invoice(total=3),
        NatsResponse({"total": 3}, headers={"currency": "EUR"}),
        Response(Invoice(total=3), correlation_id="c1"),
        # What a model hides stays hidden
        ANN, [ANN], {"user": ANN}, Response(ANN), NatsResponse([ANN], headers={"currency": "EUR"}),
        Numbers([1, 2]), Public(secret=2), Price(Decimal("1.10")), SecretStr("hunter2"),
        # Values that the gate does not store, or that it restores with another type
        datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC), Color.RED, Size.LARGE, Decimal("1.10"), UUID(int=5),  # noqa: DTZ001
        [datetime(2026, 1, 1)], [Color.RED], {Color.RED: 1}, {1: 2}, {1}, (1, (2,)), Text("x"), Response(Color.RED),  # noqa: DTZ001
        b"\xff", "", 0, False, float("nan"), 2**70, ip_address("::1"),
        # What the package itself stores for a response is no response
        {"faststream.Response": "Response", "body": "b", "headers": {}, "correlation_id": None},
        {"faststream.Response": None, "body": "b"},
        Response({"faststream.json": True, "body": "b"}), Wrapped("ok"), Titled("ok", "t"),
    ],
    ids=repr,
)  # fmt: skip
async def test_the_reply_of_a_duplicate_has_the_bytes_of_the_first(
    reply: Any, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[str] = []
    replies: list[tuple[bytes, Any, Any]] = []
    app = App("nats", Once(gate, key=HEADER, scope=f"{type(reply)}{reply!r}"[:200]))

    @app.subscriber
    @app.router.publisher("replies")
    async def on_message(message: str) -> Any:
        runs.append(message)
        return reply

    @app.broker.subscriber("replies")
    async def on_reply(message: NatsMessage) -> None:
        replies.append((message.body, message.content_type, message.headers.get("currency")))

    async with app.running():
        for _ in range(2):
            await app.publish()
    assert runs == ["x"]
    assert len(replies) == 2
    assert replies[0] == replies[1]
    assert b"hunter2" not in replies[0][0]
    assert [one.getMessage() for one in caplog.records if one.name == "idemgate.once"] == []


@pytest.mark.parametrize("kind", KINDS)
@for_each("reply", [ANN, Color.RED, "own"], ids=repr)
async def test_each_broker_gets_the_same_bytes_and_content_type(reply: Any, kind: str, gate: Gate) -> None:
    own: dict[str, Any] = {
        "nats": NatsResponse(ANN, headers={"a": "b"}),
        "kafka": KafkaResponse(ANN, headers={"a": "b"}, key=b"k"),
        "rabbit": RabbitResponse(ANN, headers={"a": "b"}, priority=3, expiration=timedelta(hours=1)),
        "redis": RedisResponse(ANN, headers={"a": "b"}, maxlen=10),
    }
    replies: list[tuple[bytes, Any, Any]] = []
    app = App(kind, Once(gate, key=HEADER, scope=f"{kind}-{reply!r}"[:200]))

    @app.subscriber
    @app.router.publisher("replies")
    async def on_message(message: str) -> Any:
        return own[kind] if reply == "own" else reply

    @app.broker.subscriber("replies")
    async def on_reply(message: Any = Context()) -> None:  # noqa: B008 - as FastStream writes it
        replies.append((message.body, message.content_type, message.headers.get("a")))

    async with app.running():
        for _ in range(2):
            await app.publish()
    assert replies[0][2] == ("b" if reply == "own" else None)
    assert len(replies) == 2
    assert replies[0] == replies[1]


async def test_each_reply_of_a_batch_has_the_bytes_of_the_first(gate: Gate) -> None:
    batches: list[list[Any]] = []
    app = App("kafka", Once(gate, key=HEADER, scope="batch"))

    @app.subscriber
    @app.router.publisher("replies", batch=True)
    async def on_message(message: str) -> list[User]:
        return [ANN, ANN]

    @app.broker.subscriber("replies", batch=True)
    async def on_reply(messages: list[Any]) -> None:
        batches.append(messages)

    async with app.running():
        for _ in range(2):
            await app.publish()
    assert [len(batch) for batch in batches] == [2, 2]
    assert batches[0] == batches[1]


class Upper:
    """A codec of a broker: it writes in capitals, and prefixes what it has not written yet."""

    async def encode(self, message: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        text = message.name if isinstance(message, User) else message
        return b">" + str(text).upper().encode(), "text/upper"

    async def decode(self, message: Any) -> Any:
        return message.body.removeprefix(b">").decode().lower()


@for_each(("body", "stored"), [(ANN, "ann"), (Text("Ann"), "ann"), ("Ann", "Ann")], ids=repr)
async def test_the_codec_of_the_broker_decides_what_is_stored(body: Any, stored: str) -> None:
    broker = NatsBroker(codec=Upper())
    assert await pack_reply(body, broker.subscriber("s")) == stored


class Failing(BaseModel):
    secret: str = "hunter2"

    @model_serializer
    def fail(self) -> dict[str, int]:
        raise ValueError("no")


@for_each(
    "reply", [Failing(), Response(Failing()), NatsResponse("x", schedule=Schedule(datetime.now(UTC), "s"))], ids=repr
)
async def test_a_reply_that_cannot_be_published_the_same_is_not_published_again(reply: Any, gate: Gate) -> None:
    scope = f"unstored-{reply!r}"[:200]
    app = App("nats", Once(gate, key=HEADER, scope=scope))

    @app.subscriber
    async def on_message(message: str) -> Any:
        return reply

    async with app.running():
        with suppress(PydanticSerializationError):  # the test broker encodes it, too
            await app.publish()
        await app.publish()
    # Then the duplicate is acknowledged, and nothing of the reply is stored
    assert isinstance(app.raised[-1], AckMessage)
    inspected = await gate.aio.inspect("e1", scope=scope)
    assert inspected.state == "done"
    assert b"hunter2" not in inspected.result


@for_each("reply", [(n for n in ()), {"rows": (n for n in ())}, Response(n for n in ())], ids=lambda reply: type(reply))
async def test_a_reply_that_has_not_ended_is_rejected(reply: Any, gate: Gate) -> None:
    app = App("nats", Once(gate, key=HEADER, scope=f"unfinished-{type(reply)}"))

    @app.subscriber
    async def on_message(message: str) -> Any:
        return reply

    async with app.running():
        await app.publish()
    assert [type(one) for one in app.raised] == [RejectMessage]


def test_a_stored_reply_of_an_unknown_class_keeps_its_content() -> None:
    reply = unpack_reply({"faststream.Response": "Gone", "body": 3, "headers": {"a": "b"}, "correlation_id": "c"})
    assert (type(reply), reply.body, reply.headers, reply.correlation_id) == (Response, 3, {"a": "b"}, "c")


@for_each("policy", [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.NACK_ON_ERROR])
async def test_a_message_whose_reply_was_not_published_returns_and_publishes_it(policy: AckPolicy, gate: Gate) -> None:
    runs: list[str] = []
    replies: list[str] = []
    failures: list[Exception] = [ConnectionError("the broker is away")]

    class Flaky(BaseMiddleware):  # type: ignore[type-arg]
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            if failures:
                raise failures.pop()
            return await call_next(cmd)

    app = App("nats", Once(gate, key=HEADER, scope=f"flaky-{policy}", backoff=2), ack_policy=policy)
    app.router.add_middleware(Flaky)

    @app.subscriber
    @app.router.publisher("replies")
    async def on_message(message: str) -> str:
        runs.append(message)
        return "done"

    @app.broker.subscriber("replies")
    async def on_reply(message: str) -> None:
        replies.append(message)

    async with app.running():
        await app.publish()
        (given_back,) = app.raised
        await app.publish()
    assert isinstance(given_back, NackMessage)
    assert given_back.extra_options == {"delay": 2}
    assert (runs, replies) == (["x"], ["done"])


async def test_no_reply_is_published_for_a_duplicate_without_a_stored_one(gate: Gate) -> None:
    replies: list[Any] = []
    app = App("nats", Once(gate, key=HEADER, scope="large", max_result_bytes=100))

    @app.subscriber
    @app.router.publisher("replies")
    async def on_message(message: str) -> str:
        return "x" * 1000

    @app.broker.subscriber("replies")
    async def on_reply(message: str) -> None:
        replies.append(message)

    async with app.running():
        await app.publish()
        await app.publish()
    assert [type(one) for one in app.raised] == [AckMessage]
    assert len(replies) == 1
    assert settled(gate) == {"handled": 1, "duplicate": 1}


async def test_a_result_that_cannot_be_stored_does_not_fail_the_message(gate: Gate) -> None:
    app = App("nats", Once(gate, key=HEADER, scope="opaque"))
    runs: list[str] = []

    @app.subscriber
    async def on_message(message: str) -> object:
        runs.append(message)
        return ip_address("::1")

    async with app.running():
        await app.publish()
        await app.publish()
    assert runs == ["x"]
    assert settled(gate) == {"handled": 1, "duplicate": 1}


async def test_a_reply_to_a_request_of_the_handler_is_not_guarded(gate: Gate) -> None:
    app = App("nats", Once(gate, key=HEADER, scope="request"))
    answers: list[Any] = []

    @app.subscriber
    async def on_message(message: str) -> None:
        answers.append(await (await app.broker.request("?", "answers")).decode())

    @app.broker.subscriber("answers")
    async def answer(message: str) -> str:
        return "!"

    async with app.running():
        await app.publish()
    assert answers == ["!"]
    assert settled(gate) == {"handled": 1}
