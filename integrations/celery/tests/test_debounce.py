"""Tasks whose calls merge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, signals
from idemgate_celery import debounced_tasks, deliver_in_workers
from pydantic import BaseModel

from idemgate import Gate, InvalidArgument
from idemgate.testing import Clock, drain
from integrations.celery.tests.conftest import sends_models
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
MERGE = {"fields": "union", "*": "last"}


class Order(BaseModel):
    id: str
    total: int


@pytest.fixture
def moved(store: str, namespace: str) -> Iterator[tuple[Gate, Clock]]:
    """A gate whose time is moved."""
    clock = Clock()
    made = Gate(store, namespace=namespace, clock=clock)
    yield made, clock
    made.close()


def count_enqueued(app: Celery) -> int:
    with app.connection_for_read() as connection:
        return int(connection.default_channel.client.llen("celery"))


def declare(app: Celery, gate: Gate, ran: list[Any], **options: Any) -> Any:
    @app.task(
        name="reindex", base=debounced_tasks(gate),
        debounce={"key": "{product}", "quiet": "1s", "max_delay": "5s", "merge": MERGE, **options},
    )  # fmt: skip
    def reindex(product: str, fields: list[str], user: str = "") -> None:
        ran.append((product, sorted(fields), user))

    return reindex


def test_many_calls_become_a_few_tasks(app: Celery, moved: tuple[Gate, Clock], work: Callable[..., Any]) -> None:
    (gate, clock), ran = moved, list[Any]()
    reindex = declare(app, gate, ran)
    # Given 20 saves of one product, 0.3 s apart, and ten of another
    for number in range(20):
        receipt = reindex.delay("p1", [f"f{number % 4}"], user=f"u{number}")
        assert receipt.status in ("scheduled", "merged")
        if number < 10:
            reindex.apply_async(kwargs={"product": "p2", "fields": ["title"]})
        clock.advance(0.3)
        drain(gate)
    clock.advance(5)
    drain(gate)
    # Then three tasks are enqueued, and a worker runs them with the merged arguments
    assert count_enqueued(app) == 3
    with work():
        wait_until(lambda: len(ran) == 3)
    first, last, other = sorted(ran)
    assert {first[0], last[0]} == {"p1"}
    assert ["f0", "f1", "f2", "f3"] in (first[1], last[1])
    assert "u19" in {first[2], last[2]}
    assert other == ("p2", ["title"], "")


@sends_models
def test_calls_with_a_model_merge_by_the_key_of_what_is_sent(
    app: Celery, moved: tuple[Gate, Clock], work: Callable[..., Any]
) -> None:
    (gate, clock), ran = moved, list[Any]()

    @app.task(name="index", base=debounced_tasks(gate), debounce={"key": "{order[id]}", "window": "1s"}, pydantic=True)
    def index(order: Order) -> None:
        ran.append(order)

    for total in (1, 2):
        index.delay(Order(id="o1", total=total))
    clock.advance(2)
    drain(gate)
    with work():
        wait_until(lambda: len(ran) == 1)
    assert ran == [Order(id="o1", total=2)]


def test_a_delivery_that_is_repeated_enqueues_the_same_id(app: Celery, moved: tuple[Gate, Clock]) -> None:
    gate, clock = moved
    reindex = declare(app, gate, [])
    reindex.delay("p1", ["a"])
    clock.advance(2)
    sent: list[str] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        sent.append(headers["id"])

    signals.before_task_publish.connect(note)
    (delivery,) = gate.topic("reindex").take()
    for _ in range(2):
        gate.topic("reindex").definition.handler(delivery)  # type: ignore[misc]
    signals.before_task_publish.disconnect(note)
    assert sent == [delivery.id] * 2


def test_calls_with_an_id_and_eager_calls_run_at_once(app: Celery, moved: tuple[Gate, Clock]) -> None:
    (gate, _), ran = moved, list[Any]()
    reindex = declare(app, gate, ran)
    chain(reindex.si("p1", ["a"]), reindex.si("p1", ["b"]), app=app).apply_async()
    assert count_enqueued(app) == 1
    app.conf.task_always_eager = True
    reindex.delay("p2", ["c"])
    assert ran == [("p2", ["c"], "")]
    assert gate.topic("reindex").stats().pending == 0


def test_a_bound_task_gets_itself(app: Celery, moved: tuple[Gate, Clock], work: Callable[..., Any]) -> None:
    (gate, clock), ran = moved, list[Any]()

    @app.task(name="bound", bind=True, base=debounced_tasks(gate), debounce={"key": "{product}", "quiet": "1s",
              "max_delay": "5s"})  # fmt: skip
    def bound(this: Any, product: str) -> None:
        ran.append((this.name, product, this.request.retries))
        if this.request.retries == 0:
            raise this.retry(countdown=0.1)

    for _ in range(3):
        bound.delay("p1")
    clock.advance(2)
    drain(gate)
    with work():
        wait_until(lambda: len(ran) == 2)
    assert ran == [("bound", "p1", 0), ("bound", "p1", 1)]


def test_a_call_may_be_delayed_and_other_options_are_refused(app: Celery, moved: tuple[Gate, Clock]) -> None:
    gate, clock = moved
    reindex = declare(app, gate, [], priority=True)
    receipt = reindex.apply_async(["p1", ["a"]], countdown=60, priority=3)
    assert receipt.due_ms == clock.microseconds() // 1000 + 60_000
    with pytest.raises(InvalidArgument, match=r"queue.*Set it on the task"):
        reindex.apply_async(["p1", ["a"]], queue="other")


@pytest.fixture
def no_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test connects is disconnected after it: else the next worker of this process would deliver, too."""
    for signal in (signals.worker_ready, signals.worker_shutting_down):
        monkeypatch.setattr(signal, "receivers", [])


@pytest.mark.usefixtures("no_receivers")
def test_a_worker_of_celery_delivers(app: Celery, gate: Gate) -> None:
    reindex = declare(app, gate, [], quiet="50ms", max_delay="1s")
    deliver_in_workers(gate, concurrency=2)
    reindex.delay("p1", ["a"])
    signals.worker_ready.send(None)  # as the main process of a worker does
    wait_until(lambda: count_enqueued(app) == 1)
    signals.worker_shutting_down.send(None)


@pytest.mark.usefixtures("no_receivers")
def test_a_worker_that_stops_as_soon_as_it_starts_leaves_no_thread(app: Celery, gate: Gate) -> None:
    declare(app, gate, [], quiet="50ms", max_delay="1s")
    app.finalize()
    deliver_in_workers(gate)
    for _ in range(3):
        signals.worker_ready.send(None)
        signals.worker_shutting_down.send(None)
    assert not [thread for thread in threading.enumerate() if thread.name == "idemgate-worker"]


def test_once_is_refused(app: Celery, gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match=r"once.*a merged call has no key"):

        @app.task(name="bad", base=debounced_tasks(gate), debounce={"key": "{product}"}, once="{product}", lazy=False)
        def bad(product: str) -> None: ...


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "names no key"),
        ({"key": "{product}", "quiet": "1s"}, "max_delay"),
        ({"key": "{sku}"}, "not a parameter"),
        ("{product}", "not a dict"),
        ({"key": "{product}", "deliver": print}, "enqueues the task"),
    ],
)
def test_bad_options_are_refused_when_the_task_is_added(app: Celery, gate: Gate, options: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):

        @app.task(name="bad", base=debounced_tasks(gate), debounce=options, lazy=False)
        def bad(product: str) -> None: ...
