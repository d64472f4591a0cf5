"""What `KafkaConsumer` does beyond the contract: order, commits, retries, dead letters, rebalances and outages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import MessageSizeTooLargeError
from confluent_kafka import KafkaError, KafkaException
from idemgate_kafka import KafkaConsumer, KafkaMessage, clients, consumer
from idemgate_kafka.message import Partition
from tenacity import Retrying

from idemgate import Bury, Gate, InvalidArgument, Retry
from idemgate.errors import DownstreamUnavailable
from integrations.kafka.tests.kafka_topics import LIBRARIES, Topics
from tests.for_each import for_each
from tests.waiting import eventually

KEY = "{message.headers[id]}"
AIO = {"bootstrap_servers": "127.0.0.1:1", "group_id": "g"}
CONFLUENT = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    """Each behaviour with both libraries."""
    name: str = request.param
    return name


@pytest.fixture
def make_consumer(gate: Gate, topics: Topics, library: str) -> Callable[..., KafkaConsumer]:
    """`make_consumer(handler, ...)`: with short times."""

    def make(handler: Any, gate: Gate = gate, settings: Any = None, **options: Any) -> KafkaConsumer:
        given = {"key": KEY, "scope": "orders", "backoff": "100ms", "dead_topic": topics.dead, **options}
        return KafkaConsumer(gate, topics.settings(library) | (settings or {}), topics.name, handler, **given)

    return make


@asynccontextmanager
async def running(*consumers: KafkaConsumer) -> AsyncIterator[asyncio.Event]:
    """Run consumers while the block runs. Enter when each has its partitions."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for each in consumers:
            ready = asyncio.Event()
            task = tasks.create_task(each.run(stop, ready=ready.set))
            await eventually(lambda ready=ready, task=task: ready.is_set() or task.done())
        try:
            yield stop
        finally:
            stop.set()


@pytest.mark.slow
async def test_a_dead_letter_has_the_error_and_the_origin(
    gate: Gate, topics: Topics, make_consumer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: KafkaMessage) -> None:
        raise ValueError(f"no stock for {message.value!r}")

    await topics.send(b"one", partition=2, key=b"k", id="a", tenant="acme")
    await topics.send(None, partition=2, key=b"k")
    # When all attempts of a record fail, and another one has no id
    async with running(make_consumer(fail, max_attempts=3)):
        await eventually(lambda: gate.counters["consumer.rejected"] == 2)
    # Then the dead letters are copies with the errors, and all is committed
    first, second = await topics.list_dead_letters()
    assert (first.key, first.value) == (b"k", b"one")
    assert dict(first.headers) == {
        "id": b"a", "tenant": b"acme", "idemgate-origin": f"{topics.name}:2:0".encode(),
        "idemgate-error": b"ValueError: no stock for b'one'",
    }  # fmt: skip
    assert second.value is None
    assert dict(second.headers)["idemgate-error"].startswith(b"idemgate.errors.MissingKey")
    assert (gate.counters["consumer.failed"], await topics.lag()) == (2, 0)
    assert f"consumer.rejected scope='orders' id='{topics.name}:2:0'" in caplog.text


@pytest.mark.slow
async def test_without_a_dead_letter_topic_a_rejected_record_is_passed_over(
    gate: Gate, topics: Topics, make_consumer: Any
) -> None:
    def refuse(message: KafkaMessage) -> None:
        raise Bury("the account is closed")

    await topics.send(b"one", id="a")
    async with running(make_consumer(refuse, dead_topic=None)):
        await eventually(lambda: gate.counters["consumer.rejected"])
    assert await topics.lag() == 0


@pytest.mark.slow
async def test_a_failed_record_goes_to_the_retry_topic_and_its_partition_goes_on(
    gate: Gate, topics: Topics, make_consumer: Any
) -> None:
    runs = list[tuple[str, str]]()

    async def work(message: KafkaMessage) -> None:
        runs.append((message.headers["id"], message.id))
        if message.headers["id"] == "a" and len(runs) < 4:
            raise Retry("the bank is busy", delay="1s")

    for record_id in "abc":
        await topics.send(b"one", id=record_id)
    began = time.time()
    async with running(make_consumer(work, order="partition", retry_topic=topics.retry)):
        await eventually(lambda: gate.counters["consumer.handled"] == 3)
    # Then the handler sees the record where it came first
    origin = f"{topics.name}:0:0"
    assert runs[0] == ("a", origin)
    assert sorted(runs[1:]) == [("a", origin), ("b", f"{topics.name}:0:1"), ("c", f"{topics.name}:0:2")]
    # And its copy says when and why it comes again
    (copy,) = await topics.list_retries()
    headers = {name: value.decode() for name, value in copy.headers}
    assert began + 1 < int(headers.pop("idemgate-due")) / 1000 < time.time() + 1
    assert headers == {
        "id": "a", "idemgate-origin": origin, "idemgate-attempt": "1",
        "idemgate-error": "idemgate.errors.Retry: the bank is busy",
    }  # fmt: skip
    assert await topics.lag() == 0


@pytest.mark.slow
async def test_a_record_that_waits_holds_up_its_key_and_the_commit(
    gate: Gate, topics: Topics, make_consumer: Any
) -> None:
    runs = list[str]()

    def work(message: KafkaMessage) -> None:
        runs.append(message.headers["id"])
        if message.headers["id"] == "a1":
            raise Retry(delay="10m")

    for record_id in ("a1", "b1", "a2", "b2", "c1"):
        await topics.send(b"one", key=record_id[:1].encode(), id=record_id)
    # Given a record that waits for ten minutes
    async with running(make_consumer(work)):
        await eventually(lambda: len(runs) == 4)
        await asyncio.sleep(0.2)
    # Then the records of other keys ran in their order, and the next consumer knows it
    assert runs == ["a1", "b1", "c1", "b2"]
    assert (await topics.lag(), gate.counters["consumer.unsettled"]) == (5, 3)
    async with running(make_consumer(work)):
        await eventually(lambda: gate.counters["consumer.failed"] == 2)
    assert runs == ["a1", "b1", "c1", "b2", "a1"]


@pytest.mark.slow
async def test_handlers_of_different_keys_run_at_once(gate: Gate, topics: Topics, make_consumer: Any) -> None:
    at_once = asyncio.Barrier(4)

    async def work(message: KafkaMessage) -> None:
        await at_once.wait()

    for number in range(8):
        await topics.send(b"one", key=str(number).encode(), id=str(number))
    async with running(make_consumer(work, batch=4, concurrency=4)):
        await eventually(lambda: gate.counters["consumer.handled"] == 8)


@pytest.mark.slow
async def test_a_long_handler_keeps_the_membership(
    gate: Gate, topics: Topics, make_consumer: Any, library: str
) -> None:
    # Given a group that a consumer leaves if it does not poll for 2 s
    name = "max_poll_interval_ms" if library == "aiokafka" else "max.poll.interval.ms"
    runs = list[str]()

    def work(message: KafkaMessage) -> None:
        runs.append(message.headers["id"])
        threading.Event().wait(4.5)

    await topics.send(b"one", id="a")
    async with running(make_consumer(work, settings={name: 2_000})):
        await eventually(lambda: gate.counters["consumer.handled"])
    assert (runs, gate.counters["consumer.unsettled"], await topics.lag()) == (["a"], 0, 0)


@pytest.mark.slow
async def test_the_next_owner_waits_for_a_handler_that_outlives_a_rebalance(
    gate: Gate, store: str, topics: Topics, make_consumer: Any
) -> None:
    runs, released = list[str](), asyncio.Event()
    other = Gate(store, namespace=gate.namespace)

    async def work(message: KafkaMessage) -> None:
        runs.append(message.headers["id"])
        if message.headers["id"] != "late":
            await released.wait()

    for partition in range(4):
        await topics.send(b"one", partition=partition, id=f"m{partition}")
    async with running(make_consumer(work)):
        await eventually(lambda: len(runs) == 4)
        # When another consumer joins while all handlers run
        async with running(make_consumer(work, other)):
            # Then it asks for the records of its partitions again and again
            await eventually(lambda: other.counters["consumer.in_progress"] >= 4)
            released.set()
            await eventually(lambda: other.counters["consumer.duplicate"] == 2)
            await eventually(topics_are_committed(topics))
    # And each record ran once
    assert sorted(runs) == ["m0", "m1", "m2", "m3"]
    await other.aio.close()
    other.close()


@pytest.mark.slow
async def test_a_cooperative_rebalance_leaves_the_other_partitions_running(
    gate: Gate, store: str, topics: Topics, make_consumer: Any, library: str
) -> None:
    if library == "aiokafka":
        pytest.skip("aiokafka has no cooperative rebalancing")
    settings = {"partition.assignment.strategy": "cooperative-sticky"}
    runs, released = list[str](), asyncio.Event()
    other = Gate(store, namespace=gate.namespace)

    async def work(message: KafkaMessage) -> None:
        runs.append(message.headers["id"])
        await released.wait()

    for partition in range(4):
        await topics.send(b"one", partition=partition, id=f"m{partition}")
    async with running(make_consumer(work, settings=settings)):
        await eventually(lambda: len(runs) == 4)
        async with running(make_consumer(work, other, settings=settings)):
            await eventually(lambda: other.counters["consumer.in_progress"] >= 4)
            released.set()
            await eventually(lambda: other.counters["consumer.duplicate"] == 2)
            await eventually(topics_are_committed(topics))
    assert sorted(runs) == ["m0", "m1", "m2", "m3"]
    # The runs of the partitions that stayed were settled there
    assert (gate.counters["consumer.handled"], gate.counters["consumer.unsettled"]) == (2, 2)
    await other.aio.close()
    other.close()


def topics_are_committed(topics: Topics) -> Callable[[], Any]:
    async def check() -> bool:
        return await topics.lag() == 0

    return check


@pytest.mark.slow
async def test_an_unavailable_service_pauses_its_partition(
    gate: Gate, topics: Topics, make_consumer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runs = list[str]()

    def work(message: KafkaMessage) -> None:
        runs.append(message.headers["id"])
        if message.partition == 0:
            raise DownstreamUnavailable("no connection", delay="10m")

    for number, partition in enumerate((0, 0, 1)):
        await topics.send(b"one", partition=partition, id=str(number))
    async with running(make_consumer(work, batch=1, retry_topic=topics.retry)):
        await eventually(lambda: gate.counters["consumer.handled"])
        await asyncio.sleep(0.2)
    # Then the retry topic gets nothing, and no attempt counts
    assert gate.counters["kafka.paused"] == 1
    assert await topics.list_retries() == []
    paused = f"kafka.paused topic='{topics.name}' partition=0 seconds=600.0: DownstreamUnavailable: no connection"
    assert paused in caplog.text


@pytest.mark.slow
async def test_an_unavailable_store_pauses_its_partition(topics: Topics, make_consumer: Any) -> None:
    runs = list[str]()
    gate = Gate("redis://127.0.0.1:1", timeout="200ms")
    await topics.send(b"one", id="a")
    async with running(make_consumer(lambda _: runs.append(""), gate, backoff="10m")):
        await eventually(lambda: gate.counters["consumer.failed"])
    assert (runs, gate.counters["kafka.paused"], await topics.lag()) == ([], 1, 1)
    await gate.aio.close()
    gate.close()


@pytest.mark.slow
async def test_a_partition_with_many_records_in_memory_is_paused(
    gate: Gate, topics: Topics, make_consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "WINDOW", 8)
    released, runs = asyncio.Event(), list[str]()

    async def work(message: KafkaMessage) -> None:
        await released.wait()
        runs.append(message.headers["id"])

    made = make_consumer(work, batch=4)
    reader = None

    def spy(*args: Any) -> None:
        nonlocal reader
        reader = args[0]
        read(*args)

    read = consumer._Reader.__init__
    monkeypatch.setattr(consumer._Reader, "__init__", spy)
    for number in range(64):
        await topics.send(b"one", id=str(number))
    async with running(made):
        lanes: Any = reader
        (lane,) = [each for partition, each in lanes._lanes.items() if partition.number == 0]
        await eventually(lambda: lane._is_paused)
        await asyncio.sleep(0.3)
        assert len(lane._records) <= 16  # what one poll brought beyond the first eight
        released.set()
        await eventually(lambda: gate.counters["consumer.handled"] == 64)
    assert runs == [str(number) for number in range(64)]


async def test_a_partition_that_is_paused_too_late_goes_on(gate: Gate) -> None:
    # In-process: the records that filled it are settled before it is paused
    calls = list[str]()

    class Client:
        async def pause(self, _: Any) -> None:
            calls.append("pause")

        async def resume(self, _: Any) -> None:
            calls.append("resume")

    made = KafkaConsumer(gate, AIO, "orders", print, key=KEY, scope="s", dead_topic=None)
    reader: Any = SimpleNamespace(consumer=made, gate=gate, client=Client())
    lane = consumer._Lane(reader, Partition("orders", 0))
    running = asyncio.create_task(lane.run())
    await eventually(lambda: lane._next_run)  # it waits for records
    await lane.pause()
    await eventually(lambda: calls == ["pause", "resume"])
    lane.leave()
    await running


@pytest.mark.slow
async def test_a_dead_letter_that_cannot_be_produced_is_tried_again(
    gate: Gate, topics: Topics, make_consumer: Any, library: str, caplog: pytest.LogCaptureFixture
) -> None:
    too_large: dict[str, Exception] = {
        "aiokafka": MessageSizeTooLargeError(),
        "confluent": KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)),
    }
    failures, runs = [too_large[library], OSError("no leader")], list[str]()

    def refuse(message: KafkaMessage) -> None:
        runs.append(message.id)
        raise Bury("the account is closed")

    made = make_consumer(refuse)
    make = made._make_producer

    def make_failing() -> Any:
        producer = make()
        send = producer.send

        async def fail(*args: Any) -> None:
            if failures:
                raise failures.pop()
            await send(*args)

        producer.send = fail
        return producer

    made._make_producer = make_failing
    await topics.send(b"one", id="a")
    async with running(made):
        await eventually(lambda: gate.counters["consumer.rejected"])
    # Then the handler did not run again, and the error is left out where it has no room
    (letter,) = await topics.list_dead_letters()
    assert (len(runs), gate.counters["kafka.send_failed"]) == (1, 1)
    assert [name for name, _ in letter.headers] == ["id", "idemgate-origin"]
    assert f"kafka.send_failed topic='{topics.name}' partition=0 to='{topics.dead}'" in caplog.text


@pytest.mark.slow
async def test_a_gate_runs_its_consumers(gate: Gate, topics: Topics, make_consumer: Any) -> None:
    values = list[str]()
    gate.add_subscriber(make_consumer(lambda message: values.append(message.json["id"]), key="{message.json[id]}"))
    async with gate.aio.subscribers():
        for outcome in ("handled", "duplicate"):
            await topics.send(b'{"id": "o-1"}')
            await eventually(lambda outcome=outcome: gate.counters[f"consumer.{outcome}"])
    assert values == ["o-1"]


@pytest.mark.slow
async def test_an_exception_that_is_no_error_ends_the_consumer(topics: Topics, make_consumer: Any) -> None:
    class Abort(BaseException):
        pass

    async def work(message: KafkaMessage) -> None:
        raise Abort

    await topics.send(b"one", id="a")
    with pytest.raises(Abort):
        await make_consumer(work).run(asyncio.Event())
    assert await topics.lag() == 1


@pytest.mark.slow
async def test_a_missing_topic_is_refused(gate: Gate, topics: Topics, make_consumer: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"dead_topic='missing': the cluster has no such topic"):
        await make_consumer(print, dead_topic="missing").run(asyncio.Event())


@pytest.mark.parametrize("settings", [AIO, CONFLUENT], ids=LIBRARIES)
async def test_a_broker_that_does_not_answer_is_raised_after_a_few_tries(
    gate: Gate, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # In-process: nothing listens there
    for module in ("aio_client", "confluent_client"):
        monkeypatch.setattr(f"idemgate_kafka.{module}.REQUEST_MS", 200)
    monkeypatch.setattr(consumer, "PAUSES", (0.01, 0.01))
    made = KafkaConsumer(gate, settings, "orders", print, key=KEY, scope="s", dead_topic=None)
    with pytest.raises(Exception, match=r"_TRANSPORT|Unable to bootstrap"):
        await made.run(asyncio.Event())
    assert gate.counters["kafka.connect_failed"] == 2
    assert "kafka.connect_failed topic='orders': Kafka" in caplog.text


@for_each(
    ("options", "name"),
    [
        ({"settings": 5}, "settings"),
        ({"settings": {"group_id": "g"}}, "settings"),
        ({"settings": {**AIO, **CONFLUENT}}, "settings"),
        ({"settings": {**AIO, "max.poll.interval.ms": 5}}, "settings"),
        ({"settings": {**CONFLUENT, "max_poll_interval_ms": 5}}, "settings"),
        ({"settings": {**AIO, "max_polling": 5}}, "settings"),
        ({"settings": {**AIO, "value_deserializer": str}}, "settings"),
        ({"settings": {"bootstrap_servers": "x"}}, "settings['group_id']"),
        ({"settings": {**AIO, "group_id": 7}}, "settings['group_id']"),
        ({"settings": {**AIO, "bootstrap_servers": 9092}}, "settings['bootstrap_servers']"),
        ({"settings": {**AIO, "bootstrap_servers": ["x:1", 9092]}}, "settings['bootstrap_servers']"),
        ({"settings": {**CONFLUENT, "bootstrap.servers": ["x:1"]}}, "settings['bootstrap.servers']"),
        ({"settings": {**AIO, "session_timeout_ms": "10000"}}, "settings['session_timeout_ms']"),
        ({"settings": {**AIO, "auto_offset_reset": "erliest"}}, "settings['auto_offset_reset']"),
        ({"settings": {**AIO, "enable_auto_commit": True}}, "settings['enable_auto_commit']"),
        ({"settings": {**CONFLUENT, "enable.auto.commit": "true"}}, "settings['enable.auto.commit']"),
        ({"topics": []}, "topics"),
        ({"topics": ["orders", 5]}, "topics"),
        ({"topics": 5}, "topics"),
        ({"handler": None}, "handler"),
        ({"handler": lambda: None}, "handler"),
        ({"dead_topic": "orders"}, "dead_topic"),
        ({"dead_topic": 5}, "dead_topic"),
        ({"retry_topic": "dead", "dead_topic": "dead"}, "retry_topic"),
        ({"order": "topic"}, "order"),
        ({"batch": 0}, "batch"),
        ({"concurrency": 0}, "concurrency"),
        ({"backoff": []}, "backoff"),
        ({"key": 7}, "key"),
        ({"key": "{message.nope}"}, "key"),
        ({"fingerprint": ["message.nope"]}, "fingerprint"),
        ({"scope": None}, "scope"),
    ],
)
def test_a_wrong_argument_is_named(gate: Gate, options: dict[str, Any], name: str) -> None:
    given: dict[str, Any] = {
        "settings": AIO, "topics": "orders", "handler": lambda _: None, "key": KEY, "scope": "s", "dead_topic": None,
    } | options  # fmt: skip
    with pytest.raises(InvalidArgument) as raised:
        KafkaConsumer(gate, **given)
    assert raised.value.name == name


@for_each(
    "options",
    [
        {"at_most_once": True}, {"cache_size": 10}, {"on_error": "store"}, {"retry": Retrying()}, {"shadow": True},
        {"order": "partition"},
    ],
)  # fmt: skip
def test_some_options_run_records_one_by_one(gate: Gate, options: dict[str, Any]) -> None:
    # A record of a batch that does not start must not be stored as done or failed
    made = KafkaConsumer(gate, AIO, "orders", lambda _: None, key=KEY, scope="s", dead_topic=None, batch=5, **options)
    assert made._batch == 1


@pytest.mark.parametrize("settings", [AIO, CONFLUENT], ids=LIBRARIES)
async def test_two_groups_of_one_gate_need_different_scopes(gate: Gate, settings: Any) -> None:
    def make(topics: Any = "orders", scope: str = "s", **more: str) -> KafkaConsumer:
        return KafkaConsumer(gate, settings | more, topics, print, key=KEY, scope=scope, dead_topic=None)

    servers, group = settings
    # Given a consumer of the gate
    gate.add_subscriber(make())
    # When another group reads one of its topics, and keeps its keys in the same scope
    other = make(["prices", "orders"], **{group: "audit"})
    # Then it is refused at the start, because each group would drop what the other one did
    with pytest.raises(InvalidArgument, match=r"scope='s': .*'audit' and 'g' both read 'orders'"):
        await other.run(asyncio.Event())
    # And another member of the group, scope, topic or cluster is not
    for fine in (make(), make(scope="t", **{group: "audit"}), make("prices", **{group: "audit"}),
                 make(**{servers: "127.0.0.1:2", group: "audit"})):  # fmt: skip
        fine._check_groups()


def test_an_error_about_settings_shows_no_value() -> None:
    with pytest.raises(InvalidArgument) as raised:
        clients.choose_library({"bootstrap.servers": "x", "sasl_password": "hunter2"})
    assert "hunter2" not in str(raised.value)
    assert "sasl_password" in str(raised.value)
