"""The tests that every consumer of messages must pass, as one class: `ConsumerContract`.

An integration shows with it that its consumer and the guard work together. Write a `Transport`: it publishes messages
and starts consumers. Return it from a fixture of a subclass, and run the subclass with pytest and pytest-asyncio in
auto mode:

```py
class TestOurConsumer(ConsumerContract):
    @pytest.fixture
    async def transport(self, url, namespace):
        async with OurTransport(url, namespace) as transport:
            yield transport
```

Each test runs with an async and with a sync handler. `kinds = ("async",)` leaves one out.

| test | what it shows |
|---|---|
| `test_copies_run_once` | a copy of the producer and a second consumer do not run a completed message again |
| `test_a_completed_message_is_not_run_again_after_a_crash` | a crash between the completion and the acknowledgement |
| `test_a_message_of_a_killed_consumer_runs_again` | a crash while the handler runs; its late end changes nothing |
| `test_a_message_in_progress_elsewhere_returns_later` | redeliveries are bounded, and other messages are not delayed |
| `test_a_message_in_progress_elsewhere_is_no_failure` | its redeliveries are not attempts, after which it is given up |
| `test_two_messages_run_at_once` | a slow handler does not hold up the other messages |
| `test_a_message_stays_invisible_while_it_runs` | a handler that takes longer than the broker's patience: `keep` |
| `test_prefetched_messages_that_expire_run_once` | messages that wait in a busy consumer for too long |
| `test_a_consumer_that_joins_or_leaves_loses_nothing` | a rebalance while messages run |
| `test_messages_stay_in_order` | a retry does not let later messages of its partition pass, if `is_ordered` |
| `test_a_conflict_becomes_a_dead_letter` | the same id with another body does not run |
| `test_a_failed_message_is_retried` | the failure releases the claim; the retry completes it |
| `test_a_message_that_always_fails_becomes_a_dead_letter` | the number of attempts is bounded |
| `test_a_graceful_stop_leaves_no_message_half_done` | running messages finish, the others stay |
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from idemgate.core.clock import monotonic
from idemgate.gate import Gate

__all__ = ["LEASE", "SCOPE", "ConsumerContract", "ContractConsumer", "Handler", "Transport", "adapt_handler"]

SCOPE = "consumer-contract"
"""The scope of the guard of each consumer."""
LEASE = "3s"
"""The lease of the guard of each consumer, which a busy machine renews in time.

A killed consumer blocks its message for this time."""
MAX_ATTEMPTS = 3
"""The attempts after which a consumer must give up a message that fails."""
MAX_REDELIVERIES = 12
"""The most deliveries in a second of a message that another owner runs. A hot loop makes hundreds."""
MAX_WAIT = 2.0
"""The seconds for which another owner runs a message that is redelivered at most `MAX_ATTEMPTS` times."""

Handler = Callable[[str, bytes], Any]
"""A handler of the contract, `handler(message_id, body)`, sync or async."""
M = TypeVar("M")


class ContractConsumer(Protocol):
    """A consumer that a `Transport` started."""

    async def stop(self) -> None:
        """Stop gracefully: running handlers finish and their messages are acknowledged. Return when that is done."""
        ...

    async def kill(self) -> None:
        """End as a killed process does: nothing more reaches the broker or the store.

        Cut the connections. A blocking handler may go on in its thread.
        """
        ...


class Transport(ABC):
    """The access of the contract to an integration: it publishes messages and starts consumers.

    A message has an id and a body. Guard the handler by the id, with the body as its fingerprint, and with the options
    `SCOPE` and `LEASE`. Retry a failed message within about a second, and give it up after `MAX_ATTEMPTS`.

    Attributes:
        redelivers: False if the transport delivers a message once at most, such as Pub/Sub.
        has_dead_letters: False if the transport drops a message that cannot succeed.
        is_concurrent: False if a consumer runs one message after the other.
        is_ordered: True if a message that is retried holds up those that were published after it. All messages of a
            test are then of one partition.
        visibility: The seconds after which the broker redelivers a message that is not kept. None: not while its
            consumer is connected. Make it short, about a second.
        gate: A gate of the namespace of the consumers, for the tests.
        deliveries: The deliveries of each id, see `count`.
    """

    redelivers: ClassVar[bool] = True
    has_dead_letters: ClassVar[bool] = True
    is_concurrent: ClassVar[bool] = True
    is_ordered: ClassVar[bool] = False
    visibility: ClassVar[float | None] = None

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.deliveries: Counter[str] = Counter()

    def count(self, message_id: str) -> str:
        """Count a delivery to a consumer and return the id. Call it before the guard decides, as in its key."""
        self.deliveries[message_id] += 1
        return message_id

    @abstractmethod
    async def publish(self, message_id: str, body: bytes) -> None:
        """Publish a message. The broker has it when this returns."""

    @abstractmethod
    async def start(self, handler: Handler, *, acknowledges: bool = True) -> ContractConsumer:
        """Start a consumer with a guarded handler. It consumes when this returns.

        Args:
            handler: see `adapt_handler`.
            acknowledges: False loses each acknowledgement on its way to the broker.
        """

    @abstractmethod
    async def is_empty(self) -> bool:
        """Return True if no message waits for a consumer or an acknowledgement.

        The contract calls it while no consumer runs.
        """

    async def list_dead_letters(self) -> list[bytes]:
        """Return the bodies of the dead letters."""
        return []


def adapt_handler(handler: Handler, read: Callable[[M], tuple[str, bytes]]) -> Callable[[M], Any]:
    """Return a callback for the transport's messages, async if the handler is.

    Args:
        handler: the handler of the contract.
        read: returns the id and the body of a message of the transport.
    """
    if inspect.iscoroutinefunction(handler):

        async def on_message_async(message: M) -> Any:
            return await handler(*read(message))

        return on_message_async

    def on_message(message: M) -> Any:
        return handler(*read(message))

    return on_message


async def wait_until(happens: Callable[[], Any | Awaitable[Any]], seconds: float) -> None:
    """Return once `happens()` is true. Raise AssertionError after some seconds."""
    end = monotonic() + seconds
    while True:
        found = happens()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


class _Work:
    """The handler's work: it records runs, can be held back, and fails as often as a test wants."""

    def __init__(self, kind: str, fails: int = 0) -> None:
        self.runs: list[str] = []
        self.ended: list[str] = []
        self._fails = fails
        self._released = threading.Event()
        self._released.set()
        self.handler: Handler = self._run_async if kind == "async" else self._run

    def hold(self) -> None:
        """Let runs wait for `release`."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def _run(self, message_id: str, _: bytes) -> str:
        self.runs.append(message_id)
        assert self._released.wait(30), "the test did not release its handlers"
        return self._end(message_id)

    async def _run_async(self, message_id: str, _: bytes) -> str:
        self.runs.append(message_id)
        await wait_until(self._released.is_set, 30)
        return self._end(message_id)

    def _end(self, message_id: str) -> str:
        if self.runs.count(message_id) <= self._fails:
            raise ValueError(f"attempt {self.runs.count(message_id)} of {message_id} fails")
        self.ended.append(message_id)
        return f"done {message_id}"


class ConsumerContract:
    """The tests of a consumer; see the module. A subclass has a fixture `transport` that returns a `Transport`.

    Attributes:
        kinds: the kinds of handlers that the consumer supports.
        patience: seconds within which something must happen.
    """

    kinds: ClassVar[tuple[Literal["async", "sync"], ...]] = ("async", "sync")
    patience: ClassVar[float] = 60.0

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run each test with each kind of handler."""
        if "kind" in metafunc.fixturenames:
            metafunc.parametrize("kind", self.kinds)

    async def test_copies_run_once(self, transport: Transport, kind: str) -> None:
        work = _Work(kind)
        consumers = [await transport.start(work.handler) for _ in range(2)]
        await transport.publish("a", b"one")
        await self._until(lambda: self._is_done(transport, "a"))
        seen = transport.deliveries["a"]
        await transport.publish("a", b"one")
        await self._until(lambda: transport.deliveries["a"] > seen)
        await self._stop(transport, *consumers)
        assert work.runs == ["a"]

    async def test_a_completed_message_is_not_run_again_after_a_crash(self, transport: Transport, kind: str) -> None:
        self._require(transport.redelivers, "redelivers no message")
        work = _Work(kind)
        doomed = await transport.start(work.handler, acknowledges=False)
        await transport.publish("a", b"one")
        await self._until(lambda: self._is_done(transport, "a"))
        await doomed.kill()
        await self._until(lambda: self._has_messages(transport))  # the acknowledgement was lost
        seen = transport.deliveries["a"]
        consumer = await transport.start(work.handler)
        await self._until(lambda: transport.deliveries["a"] > seen)
        await self._stop(transport, consumer)
        assert work.runs == ["a"]
        # A consumer need not store the result. If it does, then each copy gets that of the first run
        assert (await transport.gate.aio.inspect("a", scope=SCOPE)).value in ("done a", None)

    async def test_a_message_of_a_killed_consumer_runs_again(self, transport: Transport, kind: str) -> None:
        self._require(transport.redelivers, "redelivers no message")
        doomed_work, work = _Work(kind), _Work(kind)
        doomed_work.hold()
        try:
            doomed = await transport.start(doomed_work.handler)
            await transport.publish("a", b"one")
            await self._until(lambda: doomed_work.runs)
            await doomed.kill()
            consumer = await transport.start(work.handler)
            await self._until(lambda: self._is_done(transport, "a"))
        finally:
            doomed_work.release()
        await self._stop(transport, consumer)
        record = await transport.gate.aio.inspect("a", scope=SCOPE)
        assert (doomed_work.runs[0], work.runs[0], record.state) == ("a", "a", "done")
        # A lease that a busy machine renews too late costs another attempt
        assert len(doomed_work.runs + work.runs) <= record.attempts

    async def test_a_message_in_progress_elsewhere_returns_later(self, transport: Transport, kind: str) -> None:
        self._require(transport.redelivers, "redelivers no message")
        work = _Work(kind)
        consumer = await transport.start(work.handler)  # before the claim, because some take long to start
        async with transport.gate.aio.claim("a", scope=SCOPE, fingerprint=b"one", lease=LEASE) as owner:
            began = monotonic()
            await transport.publish("a", b"one")
            await self._until(lambda: transport.deliveries["a"])
            await transport.publish("b", b"two")
            if not transport.is_ordered:
                await self._until(lambda: self._is_done(transport, "b"))
            await self._until(lambda: monotonic() > began + 1.0)  # a hot loop has made hundreds by now
            held = monotonic() - began
            await owner.release()
        await self._until(lambda: self._is_done(transport, "a"))
        await self._until(lambda: self._is_done(transport, "b"))
        await self._stop(transport, consumer)
        assert work.runs == (["a", "b"] if transport.is_ordered else ["b", "a"])
        assert transport.deliveries["a"] <= MAX_REDELIVERIES * held

    async def test_a_message_in_progress_elsewhere_is_no_failure(self, transport: Transport, kind: str) -> None:
        self._require(transport.redelivers, "redelivers no message")
        work = _Work(kind)
        consumer = await transport.start(work.handler)
        async with transport.gate.aio.claim("a", scope=SCOPE, fingerprint=b"one", lease="200ms") as owner:
            await transport.publish("a", b"one")
            await self._until(lambda: transport.deliveries["a"])
            end = monotonic() + MAX_WAIT  # a consumer may hold the one delivery instead
            await self._until(lambda: transport.deliveries["a"] > MAX_ATTEMPTS or monotonic() > end)
            await owner.release()
        await self._until(lambda: self._is_done(transport, "a"))
        await self._stop(transport, consumer)
        assert work.runs == ["a"]
        assert await transport.list_dead_letters() == []

    async def test_two_messages_run_at_once(self, transport: Transport, kind: str) -> None:
        self._require(transport.is_concurrent, "runs one message after the other")
        work = _Work(kind)
        work.hold()
        consumer = await transport.start(work.handler)
        await transport.publish("a", b"one")
        await transport.publish("b", b"two")
        try:
            await self._until(lambda: len(work.runs) == 2)
        finally:
            work.release()
        await self._stop(transport, consumer)
        assert sorted(work.ended) == ["a", "b"]

    async def test_a_message_stays_invisible_while_it_runs(self, transport: Transport, kind: str) -> None:
        visibility = self._require_visibility(transport)
        work = _Work(kind)
        work.hold()
        consumer = await transport.start(work.handler)
        await transport.publish("a", b"one")
        try:
            await self._until(lambda: work.runs)
            began = monotonic()
            await self._until(lambda: monotonic() > began + 2 * visibility)
        finally:
            work.release()
        await self._until(lambda: self._is_done(transport, "a"))
        await self._stop(transport, consumer)
        assert (work.runs, transport.deliveries["a"]) == (["a"], 1)

    async def test_prefetched_messages_that_expire_run_once(self, transport: Transport, kind: str) -> None:
        visibility = self._require_visibility(transport)
        ids, busy, free = [f"m{n}" for n in range(16)], _Work(kind), _Work(kind)
        busy.hold()
        consumer = await transport.start(busy.handler)
        for message_id in ids:
            await transport.publish(message_id, message_id.encode())
        try:
            await self._until(lambda: busy.runs)
            began, other = monotonic(), await transport.start(free.handler)
            await self._until(lambda: monotonic() > began + 2 * visibility)
        finally:
            busy.release()
        await self._until(lambda: len(busy.ended) + len(free.ended) >= len(ids))
        await other.stop()
        await transport.publish("last", b"last")  # behind those that the first consumer still has
        await self._until(lambda: self._is_done(transport, "last"))
        await self._stop(transport, consumer)
        assert sorted(busy.runs + free.runs) == sorted([*ids, "last"])

    async def test_a_consumer_that_joins_or_leaves_loses_nothing(self, transport: Transport, kind: str) -> None:
        self._require(transport.redelivers, "redelivers no message")
        work, ids = _Work(kind), [f"m{n}" for n in range(16)]
        work.hold()
        first = await transport.start(work.handler)
        for message_id in ids[:8]:
            await transport.publish(message_id, message_id.encode())
        try:
            await self._until(lambda: work.runs)
            second = await transport.start(work.handler)
        finally:
            work.release()
        for message_id in ids[8:]:
            await transport.publish(message_id, message_id.encode())
        await first.stop()
        await self._until(lambda: len(work.ended) == len(ids))
        await self._stop(transport, second)
        assert sorted(work.runs) == sorted(ids)

    async def test_messages_stay_in_order(self, transport: Transport, kind: str) -> None:
        self._require(transport.is_ordered, "has no order")
        work = _Work(kind, fails=1)
        consumer = await transport.start(work.handler)
        for message_id in "abc":
            await transport.publish(message_id, message_id.encode())
        await self._until(lambda: len(work.ended) == 3)
        await self._stop(transport, consumer)
        assert work.runs == ["a", "a", "b", "b", "c", "c"]

    async def test_a_conflict_becomes_a_dead_letter(self, transport: Transport, kind: str) -> None:
        work = _Work(kind)
        consumer = await transport.start(work.handler)
        await transport.publish("a", b"one")
        await self._until(lambda: self._is_done(transport, "a"))
        seen = transport.deliveries["a"]
        await transport.publish("a", b"two")
        await self._until(lambda: transport.deliveries["a"] > seen)
        if transport.has_dead_letters:
            await self._until(transport.list_dead_letters)
        await self._stop(transport, consumer)
        assert work.runs == ["a"]
        letters = await transport.list_dead_letters()
        assert {*letters} == ({b"two"} if transport.has_dead_letters else set())
        assert len(letters) <= transport.deliveries["a"] - seen  # one for each delivery

    async def test_a_failed_message_is_retried(self, transport: Transport, kind: str) -> None:
        self._require(transport.redelivers, "redelivers no message")
        work = _Work(kind, fails=1)
        consumer = await transport.start(work.handler)
        await transport.publish("a", b"one")
        await self._until(lambda: self._is_done(transport, "a"))
        await self._stop(transport, consumer)
        assert (work.runs, work.ended) == (["a", "a"], ["a"])
        assert await transport.list_dead_letters() == []

    async def test_a_message_that_always_fails_becomes_a_dead_letter(self, transport: Transport, kind: str) -> None:
        self._require(transport.redelivers, "redelivers no message")
        self._require(transport.has_dead_letters, "has no dead letters")
        work = _Work(kind, fails=1_000)
        consumer = await transport.start(work.handler)
        await transport.publish("a", b"one")
        await self._until(transport.list_dead_letters)
        await self._stop(transport, consumer)
        letters = await transport.list_dead_letters()
        assert {*letters} == {b"one"}
        # One for each delivery after the last attempt: a broker may redeliver while it is sent
        assert len(letters) <= max(1, transport.deliveries["a"] - MAX_ATTEMPTS + 1)
        assert len(work.runs) == MAX_ATTEMPTS
        assert not await self._is_done(transport, "a")

    async def test_a_graceful_stop_leaves_no_message_half_done(self, transport: Transport, kind: str) -> None:
        work = _Work(kind)
        work.hold()
        consumer = await transport.start(work.handler)
        ids = [f"m{n}" for n in range(20)] if transport.redelivers else ["m0"]
        for message_id in ids:
            await transport.publish(message_id, message_id.encode())
        await self._until(lambda: work.runs)
        stopping = asyncio.create_task(consumer.stop())
        await asyncio.sleep(0.05)  # a stop that does not wait for its handlers has ended by then
        assert not stopping.done()
        work.release()
        await stopping
        # Then what began has ended
        assert sorted(work.runs) == sorted(work.ended)
        if transport.redelivers:  # and the next consumer runs the rest, and nothing twice
            other = await transport.start(work.handler)
            await self._until(lambda: len(work.ended) == len(ids))
            await self._stop(transport, other)
        assert sorted(work.ended) == sorted(ids)

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _stop(self, transport: Transport, *consumers: ContractConsumer) -> None:
        """Stop consumers; check that no message is left behind them."""
        for consumer in consumers:
            await consumer.stop()
        await self._until(transport.is_empty)

    async def _has_messages(self, transport: Transport) -> bool:
        return not await transport.is_empty()

    async def _is_done(self, transport: Transport, message_id: str) -> bool:
        return (await transport.gate.aio.inspect(message_id, scope=SCOPE)).state == "done"

    async def _until(self, happens: Callable[[], Any | Awaitable[Any]]) -> None:
        await wait_until(happens, self.patience)

    def _require_visibility(self, transport: Transport) -> float:
        self._require(transport.visibility is not None, "redelivers no message of a consumer that is connected")
        return transport.visibility or 0

    def _require(self, capable: bool, reason: str) -> None:
        if not capable:
            import pytest

            pytest.skip(f"the transport {reason}")
