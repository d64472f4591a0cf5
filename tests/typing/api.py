"""What type checkers see of the public names. Never run; mypy and pyright, both strict, have to find nothing in it.

Lines with an `ignore` are wrong on purpose: mypy says so if one of them stops being an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, Literal, Protocol, TypedDict, assert_type
from uuid import UUID

import tenacity
from prometheus_client import REGISTRY

import idemgate
from idemgate import (
    Adaptive,
    AioClaim,
    AioGate,
    AlreadyInProgress,
    Claim,
    Delivery,
    Gate,
    Guard,
    IdemgateError,
    PartialFailure,
    Receipt,
    RedisMembership,
    Topic,
    Trigger,
    Verdict,
    append,
    current,
    union,
)
from idemgate.metrics import GateCollector
from idemgate.subscribers import Expired
from idemgate.testing import Clock
from idemgate.types import (
    AioClaimBatch,
    AioSink,
    AioTopic,
    BlockedGroup,
    ClaimBatch,
    DeadLetter,
    DedupValue,
    Execution,
    GuardOptions,
    Message,
    Pause,
    Peek,
    Record,
    Sink,
    SinkEntry,
    Stats,
    StoredResult,
    StoredVersion,
    once_function,
)

gate = Gate("redis://localhost:6379/0", namespace="shop", timeout="5s", max_bytes=1000, clock=Clock())
assert_type(gate, Gate)
assert_type(gate.aio, AioGate)


# -- once: a function stays the function it was -----------------------------------------------------------------------


@gate.once(key="{event[id]}", retention="24h", lease=timedelta(seconds=30), wait=1.5)
def handle(event: dict[str, Any], loud: bool = False) -> int:
    return len(event) + loud


assert_type(handle({"id": 1}), int)
assert_type(handle({"id": 1}, loud=True), int)
handle("no dict")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handle()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def id_of(event: dict[str, str]) -> str:
    return event["id"]


@gate.once(key=id_of, fingerprint=["event"], on_error=lambda error: "store")
async def handle_soon(event: dict[str, str]) -> list[str]:
    return list(event)


async def awaiting() -> None:
    assert_type(await handle_soon({}), list[str])
    assert_type(await Shop().pay_soon("x"), int)


@gate.once()
def with_everything(a: int, /, b: str = "", *more: float, c: bool, **others: bytes) -> None: ...


with_everything(1, "b", 1.0, c=True, d=b"")


@gate.once(
    key="{k}",
    scope="s",
    fingerprint=["k"],
    on_done="raise",
    on_in_progress="wait",
    on_error="keep",
    on_lease_loss="hold",
    on_store_error="local",
    max_attempts=3,
    retry=tenacity.Retrying(stop=tenacity.stop_after_attempt(3)),
    max_result_bytes=100,
    cache_size=10,
    shadow=True,
)
def every_option(k: str) -> str:
    return k


gate.once(on_done="reply")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
gate.once(lease=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
gate.once(retry=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


class Shop:
    @gate.once(key="{order}")
    def pay(self, order: str) -> int:
        return len(order)

    @gate.once(key="{order}")
    async def pay_soon(self, order: str) -> int:
        return len(order)

    @classmethod
    @gate.once(key="{order}")
    def open(cls, order: str) -> str:
        return order

    @staticmethod
    @gate.once(key="{order}")
    def close(order: str) -> bytes:
        return order.encode()


assert_type(Shop().pay("x"), int)
assert_type(Shop.open("x"), str)
assert_type(Shop.close("x"), bytes)


class Called:
    def __call__(self, k: str) -> float:
        return float(k)


assert_type(gate.once(key="{k}")(Called())("1"), float)


# -- once: an option that skips calls lets them return None ----------------------------------------------------------


@gate.once(key="{k}", on_done="skip")
def skip_done(k: str) -> str:
    return k


@gate.once(key="{k}", on_in_progress="skip")
def skip_in_progress(k: str) -> str:
    return k


@idemgate.once(key="{k}", on_missing_key="skip")
def skip_missing(k: str) -> str:
    return k


@idemgate.once("{k}", at_most_once=True)
def skip_after_start(k: str) -> str:
    return k


@gate.once(key=lambda k: k, fingerprint=lambda k: k, on_done="skip")
async def skip_done_async(k: str) -> str:
    return k


@gate.once(
    key="{k}", on_done="replay", on_in_progress="wait", on_missing_key="run", at_most_once=False, shadow=True, wait=3
)
def never_skip(k: str) -> str:
    return k


@gate.once(key="{k}", on_done="raise")
async def never_skip_async(k: str) -> str:
    return k


@gate.once(on_done="skip")
@gate.merge(key="{k}")
def skip_merged(k: str) -> str:
    return k


@gate.callback(key=lambda k: k)
async def callback_async(k: str) -> str:
    return k


class Skipping:
    @gate.once(key="{k}", on_done="skip")
    def pay(self, k: str) -> str:
        return k

    @gate.once(key="{k}", on_done="skip")
    async def pay_async(self, k: str) -> str:
        return k

    @classmethod
    @gate.once(key="{k}", on_done="skip")
    def open(cls, k: str) -> str:
        return k

    @classmethod
    @gate.once(key="{k}", on_done="skip")
    async def open_async(cls, k: str) -> str:
        return k

    @staticmethod
    @gate.once(key="{k}", on_done="skip")
    def close(k: str) -> str:
        return k


async def skipping(options: GuardOptions) -> None:
    assert_type(skip_done("x"), str | None)
    assert_type(skip_in_progress(k="x"), str | None)
    assert_type(skip_missing("x"), str | None)
    assert_type(skip_after_start("x"), str | None)
    assert_type(await skip_done_async("x"), str | None)
    assert_type(never_skip("x"), str)
    assert_type(await never_skip_async("x"), str)
    assert_type(skip_merged.trigger("x"), Receipt)
    assert_type(await callback_async("x"), str | None)
    assert_type(Skipping().pay("x"), str | None)
    assert_type(await Skipping().pay_async("x"), str | None)
    assert_type(Skipping.open("x"), str | None)
    assert_type(await Skipping.open_async("x"), str | None)
    assert_type(Skipping().close("x"), str | None)
    assert_type(gate.once(**options)(length)("abc"), int | None)
    skip_done(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    len(skip_done("x"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# -- once: key callables ---------------------------------------------------------------------------------------------


def key_by_name(*, order: dict[str, str]) -> str:
    return order["id"]


@gate.once(key=lambda order: order["id"])
def by_lambda(order: dict[str, str]) -> int:
    return len(order)


@gate.once(key=lambda order, loud: (order["id"], loud))
def by_lambda_of_two(order: dict[str, str], loud: bool) -> int:
    return len(order) + loud


@gate.once(key=itemgetter("id"))
def by_item(order: dict[str, str]) -> int:
    return len(order)


@gate.once(key=key_by_name, fingerprint=key_by_name)
def by_key_by_name(*, order: dict[str, str]) -> int:
    return len(order)


assert_type(by_lambda({}), int)
assert_type(by_lambda_of_two({}, True), int)
assert_type(by_item({}), int)
assert_type(by_key_by_name(order={}), int)
by_lambda("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
gate.once(key=7)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


# -- once: the methods of a guarded function -------------------------------------------------------------------------


class Payments(Protocol):
    def pay(self, order: str) -> int: ...


class BasePayments:
    def pay(self, order: str) -> int:
        raise NotImplementedError


class OverriddenPayments(BasePayments):
    @gate.once(key="{order}")
    def pay(self, order: str) -> int:
        return len(order)


class OverridingPayments(OverriddenPayments):
    def pay(self, order: str) -> int:
        return 2


async def guarded_functions(payments: Payments) -> None:
    assert_type(handle.inspect({"id": 1}, loud=True), Record)
    assert_type(handle.forget({"id": 1}), bool)
    assert_type(handle.scope, str)
    assert_type(handle.key({"id": 1}), str | bytes | int)
    assert_type(handle.__name__, str)
    handle.inspect("no dict")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    handle.forget()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    handle.key("no dict")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(await handle_soon.inspect({}), Record)
    assert_type(await handle_soon.forget({}), bool)
    assert_type(skip_done.inspect("x"), Record)
    assert_type(await skip_done_async.inspect("x"), Record)
    assert_type(guarded_bare.inspect("x"), Record)
    assert_type(on_the_default_gate.inspect("x"), Record)
    assert_type(Shop.close.inspect("x"), Record)
    assert_type(Shop().close.inspect("x"), Record)
    assert_type(once_function(Shop().pay).inspect("x"), Record)
    assert_type(await once_function(Shop().pay_soon).forget("x"), bool)
    assert_type(once_function(Shop.open).inspect(order="x"), Record)
    once_function(Shop().pay).inspect(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    payments = OverriddenPayments()
    assert_type(payments.pay("x"), int)


@idemgate.once(key="{k}")
def on_the_default_gate(k: str) -> str:
    return k


assert_type(on_the_default_gate("x"), str)


# -- claims -----------------------------------------------------------------------------------------------------------


def claims() -> None:
    claim = gate.claim(
        "k", scope="s", lease="30s", retention=60, fingerprint={"a": 1}, on_lease_loss="hold", max_attempts=3
    )
    assert_type(claim, Claim)
    assert_type(claim.state, Literal["started", "in_progress", "done"])
    assert_type(claim.started, bool)
    with gate.claim_many(["a", b"b", 3], lease="30s") as claims:
        assert_type(claims, ClaimBatch)
        assert_type(claims[0], Claim)
        assert_type(claims[0].error, IdemgateError | None)
        assert_type(gate.complete_many([(one, 1) for one in claims], retention="1h"), list[bool])
        assert_type(gate.release_many(claims), list[bool])
    assert_type(claim.token, int)
    assert_type(claim.attempt, int)
    assert_type(claim.taken_over, int)
    assert_type(claim.retry_after, float | None)
    assert_type(claim.complete({"any": "thing"}, retention="1h"), bool)
    assert_type(claim.release(), bool)
    assert_type(claim.extend("1m"), bool)
    assert_type(claim.checkpoint([1]), bool)
    assert_type(claim.wait("1s"), Literal["started", "in_progress", "done"])
    with gate.claim(7) as number, gate.claim(b"7"):
        assert_type(number, Claim)
    assert_type(gate.first("k", "20s"), bool)
    assert_type(gate.first_many(["a", 1, b"c"], "20s"), list[bool])
    assert_type(gate.forget("k", force=True), bool)
    assert_type(gate.resolve("k", done=True, result=1), bool)
    record = gate.inspect("k")
    assert_type(record, Record)
    assert_type(record.lease_left, float | None)
    gate.claim(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    gate.resolve("k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def awaiting_claims() -> None:
    claim = await gate.aio.claim("k")
    assert_type(claim, AioClaim)
    assert_type(claim.state, Literal["started", "in_progress", "done"])
    assert_type(await claim.complete(1), bool)
    assert_type(await claim.release(), bool)
    assert_type(await claim.extend(), bool)
    assert_type(await claim.checkpoint(1), bool)
    assert_type(await claim.wait(1), Literal["started", "in_progress", "done"])
    async with gate.aio.claim("k") as held:
        assert_type(held, AioClaim)
    async with gate.aio.claim_many(["a"]) as claims:
        assert_type(claims, AioClaimBatch)
        assert_type(claims[0], AioClaim)
    assert_type(await gate.aio.claim_many(["a"]), AioClaimBatch)
    assert_type(await gate.aio.complete_many([(one, 1) for one in claims]), list[bool])
    assert_type(await gate.aio.release_many(claims), list[bool])
    assert_type(await gate.aio.first("k", 20), bool)
    assert_type(await gate.aio.first_many([], 20), list[bool])
    ids = gate.aio.dedup("s", 20)
    assert_type(await ids.add("k"), bool)
    assert_type(await ids.add_many([]), list[bool])
    assert_type(await ids.get_or_set("k", 7), DedupValue[int])
    assert_type((await ids.get_or_set("k", "pay_1")).value, str)
    assert_type(await ids.get_or_set_many({"k": b"x"}.items()), list[DedupValue[bytes]])
    assert_type(gate.dedup("s", 20).get("k"), str | bytes | int | UUID | None)
    gate.dedup("s", 20).get_or_set("k", 1.5)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    assert_type(await gate.aio.inspect("k"), Record)
    assert_type(await gate.aio.forget("k"), bool)
    assert_type(await gate.aio.resolve("k", done=False), bool)


async def inside() -> None:
    execution = current()
    assert_type(execution, Execution)
    assert_type(execution.token, int)
    assert_type(execution.lease_lost, bool)
    assert_type(execution.checkpoint(1), bool)
    assert_type(await execution.aio.checkpoint(1), bool)


def errors() -> None:
    try:
        handle({})
    except AlreadyInProgress as error:
        assert_type(error.retry_after, float)
        assert_type(error.key, str)
    except idemgate.StoreUnavailable as error:
        assert_type(error.executed, str)


# -- merge ------------------------------------------------------------------------------------------------------------


@gate.merge(key="{doc_id}", quiet="5s", max_delay="1m", merge={"tags": "union", "*": "last"})
def reindex(doc_id: int, tags: tuple[str, ...] = ()) -> str:
    return str(doc_id)


assert_type(reindex(7), str)
assert_type(reindex.trigger(doc_id=7), Receipt)
assert_type(reindex.topic, Topic)
reindex.trigger("seven")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@idemgate.merge(window="2s")
async def render(page: str) -> bytes:
    return page.encode()


async def awaiting_merge() -> None:
    assert_type(await render("x"), bytes)
    assert_type(await render.aio.trigger("x"), Receipt)


# -- topics -----------------------------------------------------------------------------------------------------------


images = gate.topic("images", window="2s", merge=append(10), slots=4, backoff=["1s", 5], dead_retention="30d")
tags = gate.topic("tags", quiet=1, max_delay=10, max_size=100, merge=union(100))
waits = gate.topic("waits", backoff=tenacity.wait_exponential(max=60))
assert_type(images, Topic)
assert_type(images.aio, AioTopic)
assert_type(gate.aio.topic("images"), AioTopic)


@images.handler
def on_image(delivery: Delivery[dict[str, int]]) -> None:
    assert_type(delivery.payload, dict[str, int])
    assert_type(delivery.key, str)
    assert_type(delivery.count, int)
    assert_type(delivery.first_at, datetime)
    assert_type(delivery.attempt, int)
    assert_type(delivery.token, int)


@images.handler
async def on_image_soon(delivery: Delivery[list[str]]) -> None: ...


@images.handler
def on_some_images(delivery: Delivery[list[str]]) -> PartialFailure:
    return PartialFailure([item for item in delivery.payload if item], "empty", delay="5s")


class Order(TypedDict):
    id: str


orders: Topic[Order] = gate.topic("orders")
lines: Topic[str, list[str]] = gate.topic("lines", merge=append(10))


@orders.handler
def on_order(delivery: Delivery[Order]) -> str:
    return delivery.payload["id"]


@orders.handler
async def on_order_soon(delivery: Delivery[Order]) -> None: ...


@orders.handler
def on_any_order(delivery: Delivery) -> None:
    assert_type(delivery, Delivery[Any])


@orders.handler  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def on_wrong_order(delivery: Delivery[list[str]]) -> None: ...


@lines.handler
def on_lines(delivery: Delivery[list[str]]) -> int:
    return len(delivery.payload)


async def typed_topics(bare: Topic, soon: AioTopic[Order]) -> None:
    assert_type(bare, Topic[Any, Any])
    assert_type(orders, Topic[Order, Order])
    assert_type(orders.aio, AioTopic[Order])
    orders.trigger("k", {"id": "7"})
    orders.trigger("k", delay="5s")
    orders.trigger("k", "7")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    orders.trigger_many([("k", {"id": "7"}), Trigger("k")])
    orders.trigger_many([("k", 7)])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    assert_type(orders.take(), list[Delivery[Order]])
    assert_type(orders.decode_forwarded(b""), Delivery[Order])
    assert_type(on_order(orders.take()[0]), str)
    assert_type(await soon.take(), list[Delivery[Order]])
    await soon.trigger("k", 7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    lines.trigger("k", "a line")
    lines.trigger("k", ["a line"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(lines.take()[0].payload, list[str])
    orders.ack(orders.take())
    orders.every("* * * * *", name="hourly", payload=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@gate.lifespan
def database() -> Iterator[None]:
    yield


@gate.lifespan
async def client() -> AsyncIterator[int]:
    yield 1


gate.lifespan(int)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]

sessions = gate.on_expired("sessions", "session:*", notifications="set", scan="1m")


@sessions.handler
async def ended(gone: Expired) -> None:
    assert_type(gone.key, str)
    assert_type(gone.until, datetime | None)
    assert_type(sessions.track(gone.key), Literal["tracked", "lasting", "absent"])
    assert_type(await sessions.aio.untrack(gone.key), Literal["cancelled", "in_flight", "absent"])
    gate.on_expired("others", "other:*", notifications="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@sessions.handler  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
def wrong(gone: int) -> None: ...


def topics() -> None:
    receipt = images.trigger("k", {"any": 1}, delay="5s", version=3, event_id="e")
    assert_type(receipt, Receipt)
    assert_type(receipt.status, Literal["scheduled", "merged", "replaced", "dropped", "duplicate"])
    assert_type(receipt.due_at, datetime | None)
    images.trigger("k", at=datetime.now(UTC))
    assert_type(images.trigger_many([("a", 1), Trigger("b", 2, delay=1)]), list[Receipt])
    deliveries = images.take(10)
    assert_type(deliveries, list[Delivery[Any]])
    assert_type(images.ack(deliveries[0]), Literal["ok", "dead", "cancelled", "lost"])
    assert_type(images.ack(deliveries), list[Literal["ok", "dead", "cancelled", "lost"]])
    assert_type(images.nack(deliveries, delay="1s", reason="later"), list[Literal["ok", "dead", "cancelled", "lost"]])
    assert_type(images.nack(deliveries[0], items=[1]), Literal["ok", "dead", "cancelled", "lost"])
    images.nack(deliveries, items=[1])  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert_type(images.bury(deliveries[0], reason="no"), Literal["ok", "dead", "cancelled", "lost"])
    assert_type(images.extend(deliveries[0], "1m"), Literal["ok", "dead", "cancelled", "lost"])
    assert_type(images.bury("k", group="g"), Literal["buried", "in_flight", "absent"])
    assert_type(images.cancel("k"), Literal["cancelled", "in_flight", "absent"])
    assert_type(images.reschedule("k", delay=1), Literal["rescheduled", "in_flight", "absent"])
    assert_type(images.flush(), int)
    assert_type(images.versions("k"), StoredVersion | None)
    assert_type(images.reset_version("k"), bool)
    peek = images.peek("k")
    assert_type(peek, Peek)
    assert_type(peek.pending, Message | None)
    assert_type(images.stats(), Stats)
    assert_type(images.stats().paused, Pause | None)
    assert_type(images.stats().oldest_blocked, BlockedGroup | None)
    assert_type(images.pause("why"), bool)
    assert_type(images.stats()["accepted"], int)
    assert_type(images.next_due(), datetime | None)
    assert_type(images.dead.list(), list[DeadLetter])
    assert_type(images.dead.list(5, skip=1, key="a*", reason="x", since=datetime.now(UTC)), list[DeadLetter])
    assert_type(images.dead.redrive(["0-1"]), int)
    assert_type(images.dead.redrive(key="a*", reason="x", until=datetime.now(UTC), limit=5), int)
    assert_type(images.dead.delete(since=datetime.now(UTC)), int)
    images.trigger(1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def awaiting_topics() -> None:
    topic = gate.aio.topic("images")
    assert_type(await topic.trigger("k", 1), Receipt)
    deliveries = await topic.take()
    assert_type(deliveries, list[Delivery[Any]])
    assert_type(await topic.ack(deliveries[0]), Literal["ok", "dead", "cancelled", "lost"])
    assert_type(await topic.ack(deliveries), list[Literal["ok", "dead", "cancelled", "lost"]])
    assert_type(await topic.peek("k"), Peek)
    assert_type(await topic.versions("k", group="g"), StoredVersion | None)
    assert_type(await topic.reset_version("k"), bool)
    assert_type(await topic.stats(), Stats)
    assert_type(await topic.dead.list(), list[DeadLetter])
    async with gate.aio.worker(membership="redis") as worker:
        assert_type(worker.limits, dict[str, int])
    gate.aio.worker(membership=RedisMembership(gate, ttl="5s"))
    gate.aio.worker(membership="members")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    gate.topic("adaptive", adaptive=Adaptive(most=50, target="1s", errors=(TimeoutError,)))
    gate.topic("adaptive", adaptive=50)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# -- the guard of a consumer ------------------------------------------------------------------------------------------


def length(text: str) -> int:
    return len(text)


async def length_async(text: str) -> int:
    return len(text)


async def consume(guard: Guard) -> None:
    assert_type(guard.run("k", length, "abc"), Verdict[int])
    assert_type(await guard.aio.run("k", length_async, "abc"), Verdict[int])
    assert_type(guard.run_many([("a", "x")], length), list[Verdict[int]])
    assert_type(await guard.aio.run_many([("a", "x")], length_async, concurrency=2), list[Verdict[int]])
    verdict = guard.run("k", length, "abc")
    if verdict.action == "reject":  # as in docs/guides/task-queues.md
        assert verdict.error is not None
        raise verdict.error
    guard.run("k", length, 5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await guard.aio.run("k", length_async, 5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(await guard.aio.run("k", length, "abc"), Verdict[int])
    assert_type(await guard.aio.run_many([(None, "x")], length), list[Verdict[int]])
    assert_type(gate.once(length).verdict("abc", keep=print), Verdict[int])
    assert_type(await gate.once(length_async).verdict("abc"), Verdict[int])
    assert_type(guard.run("k", length, "abc").error, Exception | None)  # what `exc=` of Celery's `retry` takes


guard = gate.guard("orders", on_missing_key="skip", retention="7d")
gate.guard("orders", on_missing_key="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
guarded_bare = gate.once(length)
assert_type(guarded_bare("abc"), int)
guarded_callback = gate.callback(key="{text}")(length)
assert_type(guarded_callback("abc"), int | None)


@gate.once(key="{item}")
@gate.merge(key="{item}")
def composed(item: str) -> int:
    return len(item)


class InMemory:
    """A sink of blocking functions."""

    def apply(self, entry: SinkEntry, work: Callable[[], StoredResult]) -> StoredResult | None:
        return work() if entry.token else None


class AioInMemory:
    """A sink of async functions."""

    async def apply(self, entry: SinkEntry, work: Callable[[], Awaitable[StoredResult]]) -> StoredResult | None:
        return await work() if entry.token else None


sink: Sink = InMemory()
aio_sink: AioSink = AioInMemory()
assert_type(gate.once(key="{text}", sink=sink)(length)("abc"), int)
gate.guard("orders", sink=AioInMemory())
gate.guard("orders", sink="postgresql:///shop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

composed.with_options(delay="5s", event_id=7).trigger("a")
composed.with_options(colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

REGISTRY.register(GateCollector(gate, gate))
GateCollector("shop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
