"""Tasks that run once per key, in a worker of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from enum import IntEnum
from typing import Any, NamedTuple

import pytest
from celery import Celery, chain, chord, group, signals
from celery.backends.base import DisabledBackend
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Reject
from celery.worker import state
from django.db import transaction
from idemgate_celery import DebouncedTask, OnceTask, once_tasks
from kombu.exceptions import EncodeError, OperationalError
from pydantic import BaseModel

from idemgate import AlreadyInProgress, Bury, Gate, InvalidArgument, KeyReused, Retry
from idemgate.errors import AttemptsExhausted, ResultUnavailable
from integrations.celery.tests.conftest import sends_models
from tests.for_each import for_each
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),  # of Celery, by redis-py 8
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # kombu closes no connection of a thread
]
Work = Callable[..., Any]


class Declined(Exception):
    pass


class Size(IntEnum):
    LARGE = 3


class Point(NamedTuple):
    x: int
    y: int


class Order(BaseModel):
    id: str


class Receipt(BaseModel):
    order: str


def outcome(result: Any) -> Any:
    """Return the result of a task, or its error."""
    wait_until(result.ready, 30)
    return result.result


# -- in a worker ------------------------------------------------------------------------------------------------------


def test_a_copy_gets_the_result_of_the_first_run(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[Any] = []

    @app.task(name="charge", once={"key": "{order[id]}", "fingerprint": ["order[total]"], "backoff": "500ms"})
    def charge(order: dict[str, Any]) -> str:
        ran.append(order)
        return f"R-{order['id']}"

    @app.task(name="plain")
    def plain(n: int) -> int:
        return n

    with work():
        first, copy = [charge.delay({"id": "o1", "total": 5}) for _ in range(2)]
        assert [outcome(first), outcome(copy), outcome(plain.delay(3))] == ["R-o1", "R-o1", 3]
        other = charge.delay({"id": "o1", "total": 6})
        assert outcome(other).__class__.__name__ == KeyReused.__name__
    assert len(ran) == 1
    assert (gate.counters["consumer.handled"], gate.counters["consumer.rejected"]) == (1, 1)


UNSTORED = {
    "naive datetime": datetime(2026, 1, 1),  # noqa: DTZ001
    "IntEnum": Size.LARGE,
    "namedtuple": Point(1, 2),
    "too large": "x" * 300_000,
    "refused by the backend, too": object(),
}


def test_a_copy_fails_if_the_result_of_the_first_was_not_stored(app: Celery, gate: Gate, work: Work) -> None:
    mailed: list[Any] = []

    @app.task(name="make", once="{name}")
    def make(name: str) -> Any:
        return UNSTORED[name]

    @app.task(name="mail")
    def mail(result: Any) -> None:
        mailed.append(result)

    with work():
        for name in UNSTORED:
            first = outcome(make.delay(name))
            assert isinstance(first, EncodeError) == ("refused" in name)
            # A copy whose result is read fails, and so does one that passes it on
            copies = [
                make.delay(name), make.apply_async([name], link=mail.s()), chain(make.s(name), mail.s())().parent,
            ]  # fmt: skip
            assert [type(outcome(copy)).__name__ for copy in copies] == ["ResultUnavailable"] * 3, name
            with pytest.raises(ResultUnavailable):
                make(name)
    assert mailed == []


@for_each("has_backend", [True, False])
def test_a_copy_whose_result_nothing_reads_succeeds_without_one(
    has_backend: bool, app: Celery, gate: Gate, work: Work
) -> None:
    succeeded: list[Any] = []

    @app.task(name=f"make-{has_backend}", once="{n}", ignore_result=has_backend)
    def make(n: int) -> Any:
        return Size.LARGE

    def on_success(**facts: Any) -> None:
        succeeded.append(facts["result"])

    if not has_backend:
        make.backend = DisabledBackend(app=app)
    signals.task_success.connect(on_success, sender=make, weak=False)
    with work():
        make.delay(1)
        wait_until(lambda: succeeded == [Size.LARGE])
        make.delay(1)
        wait_until(lambda: succeeded == [Size.LARGE, None])
    signals.task_success.disconnect(on_success, sender=make)


def test_a_task_that_runs_elsewhere_is_retried_without_its_own_retries(app: Celery, gate: Gate, work: Work) -> None:
    @app.task(name="charge", bind=True, max_retries=0, once={"key": "{order}", "backoff": "500ms"})
    def charge(self: Any, order: str) -> int:
        return self.request.retries  # type: ignore[no-any-return]

    claim = gate.claim("o1", scope="charge", lease="1m")  # another worker
    with work():
        result = charge.delay("o1")
        wait_until(lambda: gate.counters["consumer.in_progress"])
        claim.release()
        assert outcome(result) == 0


def test_a_failure_is_that_of_celery(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[str] = []

    @app.task(name="fails", once="{order}")
    def fails(order: str) -> None:
        ran.append(order)
        raise Declined("no")

    @app.task(name="again", once="{order}", autoretry_for=(Declined,), retry_kwargs={"countdown": 0.5}, max_retries=2)
    def again(order: str) -> str:
        ran.append(order)
        if ran.count(order) < 3:
            raise Declined("no")
        return "ok"

    with work():
        assert isinstance(outcome(fails.delay("f")), Exception)
        assert outcome(again.delay("a")) == "ok"
    assert sorted(ran) == ["a", "a", "a", "f"]
    reported = sorted((one.of, one.error.rpartition(".")[2]) for one in gate.context.activity.failures)
    assert reported == [("again", "Declined: no")] * 2 + [("fails", "Declined: no")]
    assert gate.inspect("f", scope="fails").state == "released"
    assert (gate.counters["consumer.rejected"], gate.counters["consumer.failed"]) == (1, 0)


def test_attempts_are_those_of_the_guard_if_it_limits_them(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[str] = []

    @app.task(name="fails", once={"key": "{order}", "max_attempts": 3, "backoff": "500ms"})
    def fails(order: str) -> None:
        ran.append(order)
        raise Declined("no")

    @app.task(name="decides", once={"key": "{order}", "max_attempts": 3, "backoff": "1h"})
    def decides(order: str) -> None:
        ran.append(order)
        raise Bury("the account is closed") if ran.count(order) == 2 else Retry("busy", delay="500ms")

    with work():
        decided = decides.delay("o2")
        error, last = outcome(fails.delay("o1")), outcome(decided)
    assert (ran.count("o1"), ran.count("o2")) == (3, 2)
    assert type(error).__name__ == AttemptsExhausted.__name__
    assert "Declined: no" in str(error)
    assert str(last) == "the account is closed"
    assert (gate.counters["consumer.failed"], gate.counters["consumer.rejected"]) == (3, 2)


def test_what_a_task_tells_celery_passes_through(app: Celery, gate: Gate, work: Work) -> None:
    @app.task(name="other")
    def other(order: str) -> str:
        return f"other {order}"

    @app.task(name="replaced", bind=True, once="{order}")
    def replaced(self: Any, order: str) -> Any:
        return self.replace(other.s(order))

    @app.task(name="dropped", once="{order}")
    def dropped(order: str) -> None:
        raise Reject("no", requeue=False)

    @app.task(name="later", bind=True, once={"key": "{order}", "max_attempts": 2})
    def later(self: Any, order: str) -> None:
        raise self.retry(countdown=0.5)

    with work():
        assert outcome(replaced.delay("o1")) == "other o1"
        dropped.delay("o2")
        error = outcome(later.delay("o3"))  # its retry is refused
        wait_until(lambda: gate.inspect("o2", scope="dropped").state == "released")
    assert gate.inspect("o1", scope="replaced").state == "done"
    assert type(error).__name__ == AttemptsExhausted.__name__
    # And a retry that it asked for is a failure only if none is left
    failures = gate.context.activity.failures
    assert sorted((one.of, one.attempt) for one in failures) == [("dropped", 1), ("later", 2)]


def test_a_task_that_puts_its_message_back_runs_again(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[str] = []

    @app.task(name="charge", once="{order}")
    def charge(order: str) -> str:
        ran.append(order)
        if len(ran) == 1:
            raise Reject("not now", requeue=True)
        return f"R-{order}"

    with work():
        assert outcome(charge.delay("o1")) == "R-o1"
    assert ran == ["o1", "o1"]


def test_callbacks_of_a_copy_get_the_stored_result(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[str] = []
    called: list[Any] = []

    @app.task(name="charge", once={"key": "{order}", "fingerprint": ["total"]})
    def charge(order: str, total: int = 5) -> str:
        ran.append(order)
        return f"R-{order}"

    @app.task(name="mail")
    def mail(receipt: str) -> str:
        called.append(receipt)
        return f"mailed {receipt}"

    @app.task(name="alert")
    def alert(task_id: str) -> None:
        called.append(task_id)

    with work():
        outcome(charge.delay("o1"))
        # Given copies with callbacks, in a chain and in a group
        linked = charge.apply_async(["o1"], link=mail.s())
        chained = (charge.s("o1") | mail.s()).delay()
        grouped = group(charge.s("o1"), charge.s("o1"), app=app).delay()
        # Then each of them gets the result of the first run
        assert (outcome(linked), outcome(chained)) == ("R-o1", "mailed R-o1")
        assert [outcome(each) for each in grouped.results] == ["R-o1"] * 2
        # And a copy that is rejected calls its error callback
        rejected = charge.apply_async(["o1", 6], link=mail.s(), link_error=alert.si("of o1"))
        assert type(outcome(rejected)).__name__ == KeyReused.__name__
        wait_until(lambda: len(called) == 3)
    assert (ran, sorted(called)) == (["o1"], ["R-o1", "R-o1", "of o1"])


def test_a_task_that_is_revoked_before_it_runs_leaves_no_key(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[str] = []

    @app.task(name="charge", once="{order}")
    def charge(order: str) -> None:
        ran.append(order)

    # Given a task that the worker knows as revoked before it gets it
    revoked = charge.delay_once("o3")
    state.revoked.add(revoked.id)
    with work():
        waiting = charge.apply_async(["o1"], countdown=5)
        expired = charge.apply_async(["o2"], expires=-1)
        app.control.revoke([waiting.id])
        for result in (waiting, expired, revoked):
            assert type(outcome(result)).__name__ == "TaskRevokedError"
        # Then the key may be enqueued again, and runs
        wait_until(lambda: gate.inspect("o3", scope="charge:queued").state == "absent")
        assert [gate.inspect(order, scope="charge").state for order in ("o1", "o2", "o3")] == ["absent"] * 3
        assert ran == []
        assert outcome(charge.delay_once("o3")) is None
    assert ran == ["o3"]


def test_the_members_of_a_chord_may_wait(app: Celery, gate: Gate, work: Work) -> None:
    @app.task(name="part", once={"key": "{n}", "backoff": "500ms"})
    def part(n: int) -> int:
        return n

    @app.task(name="total")
    def total(parts: list[int]) -> int:
        return sum(parts)

    gate.claim(2, scope="part", lease="1s")
    with work():
        assert outcome(chord([part.s(n) for n in (1, 2, 3)], app=app)(total.s())) == 6


def test_a_task_stays_invisible_while_it_runs_or_waits_for_its_time(app: Celery, gate: Gate, work: Work) -> None:
    # Given a broker that redelivers after a second, and a task that takes three
    app.conf.broker_transport_options["visibility_timeout"] = 1
    ran: list[str] = []

    @app.task(name="slow", once={"key": "{order}", "lease": "1s"})
    def slow(order: str) -> None:
        ran.append(order)
        time.sleep(3)

    @app.task(name="later", once="{order}", acks_late=False)
    def later(order: str) -> None:
        ran.append(order)

    with work():
        # And one that waits in the worker for as long
        waiting = later.apply_async(["o2"], countdown=3)
        outcome(slow.delay("o1"))
        outcome(waiting)
    # Then nothing of them came a second time
    assert sorted(ran) == ["o1", "o2"]
    assert {name: n for name, n in gate.counters.snapshot().items() if name.startswith("consumer.")} == {
        "consumer.handled": 2
    }


# -- called, and eager ------------------------------------------------------------------------------------------------


def test_a_task_that_is_called_raises_the_errors_of_the_guard(app: Celery, gate: Gate) -> None:
    @app.task(name="charge", bind=True, once="{order}")
    def charge(self: Any, order: str) -> str:
        if order == "ignored":
            raise Ignore
        return f"R-{order}"

    assert [charge("o1"), charge("o1"), charge.apply(["o1"]).get()] == ["R-o1"] * 3
    gate.claim("busy", scope="charge")
    with pytest.raises(AlreadyInProgress):
        charge("busy")
    with pytest.raises(Ignore):
        charge("ignored")
    assert charge("ignored") is None
    app.conf.task_always_eager = True
    assert charge.delay("o1").get() == charge.delay_once("o1").get() == "R-o1"
    assert isinstance(charge.delay("busy").get(propagate=False), AlreadyInProgress)


def test_a_copy_of_a_pydantic_task_gets_what_the_first_got(app: Celery, gate: Gate, work: Work) -> None:
    def run(order: str) -> Receipt:
        return Receipt(order=order)

    run.__annotations__["return"] = Receipt  # Celery 5.5 reads no annotation that is text, as in this file
    charge = app.task(name="charge", once="{order}", pydantic=True, autoretry_for=(Declined,))(run)
    with work():
        assert [outcome(charge.delay("o1")) for _ in range(2)] == [{"order": "o1"}] * 2
    assert gate.counters["consumer.handled"] == 1


@sends_models
def test_a_model_has_the_key_of_what_is_sent(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[Order] = []

    @app.task(name="charge", once="{order[id]}", pydantic=True)
    def charge(order: Order) -> str:
        ran.append(order)
        return f"R-{order.id}"

    order = Order(id="o1")
    with work():
        assert [outcome(each(order)) for each in (charge.delay_once, charge.delay, charge.delay_once)] == ["R-o1"] * 3
    assert [charge(order), charge.apply([order]).get()] == ["R-o1"] * 2
    assert ran == [order]


def test_a_task_of_django_is_enqueued_on_commit(
    gate: Gate, app: Celery, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ShopTask(once_tasks(gate), DjangoTask):  # type: ignore[misc]
        abstract = True

    @app.task(name="charge", base=ShopTask, once="{order}")
    def charge(order: str) -> str:
        return f"R-{order}"

    committed: list[Callable[[], Any]] = []
    monkeypatch.setattr(transaction, "on_commit", committed.append)
    charge.delay_on_commit("o1")
    charge.apply_async_on_commit(["o1"])
    with work():
        assert [outcome(commit()) for commit in committed] == ["R-o1"] * 2
    assert gate.counters["consumer.handled"] == 1


# -- enqueue once -----------------------------------------------------------------------------------------------------


def test_delay_once_returns_the_result_of_a_task_that_failed_before_it_was_recorded(
    app: Celery, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="charge", once="{order}")
    def charge(order: str) -> None: ...

    enqueue = charge.apply_async

    def enqueue_and_fail(args: Any, kwargs: Any, **options: Any) -> Any:
        result = enqueue(args, kwargs, **options)
        charge._forget_queued(result.id, args, kwargs)  # as a worker does that was quick
        return result

    monkeypatch.setattr(charge, "apply_async", enqueue_and_fail)
    first, second = charge.delay_once("o1"), charge.delay_once("o1")
    # Then each call returns the task that it enqueued
    assert first.id != second.id
    with app.connection_for_read() as connection:
        found = [json.loads(one)["headers"]["id"] for one in connection.default_channel.client.lrange("celery", 0, -1)]
    assert found == [second.id, first.id]


def test_delay_once_enqueues_the_first_and_returns_its_result(app: Celery, gate: Gate, work: Work) -> None:
    ran: list[str] = []
    declined = {"bad"}

    @app.task(name="charge", once="{order}")
    def charge(order: str) -> str:
        ran.append(order)
        if order in declined:
            raise Declined("no")
        return f"R-{order}"

    first, copy = charge.delay_once("o1"), charge.delay_once(order="o1")
    assert first.id == copy.id
    with app.connection_for_read() as connection:
        assert connection.default_channel.client.llen("celery") == 1
    with work():
        assert outcome(copy) == "R-o1"
        assert outcome(charge.delay_once("o1")) == "R-o1"
        # The key of a task that failed may be enqueued again, and its result is not the old failure
        failed = charge.delay_once("bad")
        assert isinstance(outcome(failed), Exception)
        wait_until(lambda: gate.inspect("bad", scope="charge:queued").state == "absent")
        declined.clear()
        again = charge.delay_once("bad")
        assert outcome(again) == "R-bad"
        # And a late failure of the first task does not free the key of the second
        charge._forget_queued(failed.id, ["bad"], {})
        assert charge.delay_once("bad").id == again.id
    assert sorted(ran) == ["bad", "bad", "o1"]


def test_many_threads_enqueue_one_task(app: Celery, gate: Gate) -> None:
    @app.task(name="charge", once="{order}")
    def charge(order: str) -> None: ...

    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.append(charge.delay_once("o1").id)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ids) == 16
    assert len(set(ids)) == 1
    with app.connection_for_read() as connection:
        assert connection.default_channel.client.llen("celery") == 1


def test_a_broker_that_is_away_leaves_the_key_to_the_next_caller(
    app: Celery, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="charge", once="{order}")
    def charge(order: str) -> None: ...

    def publish(*_: Any, **__: Any) -> None:
        raise OperationalError("no connection")

    monkeypatch.setattr(app.tasks["charge"].__class__, "apply_async", publish)
    with pytest.raises(OperationalError):
        charge.delay_once("o1")
    assert gate.inspect("o1", scope="charge:queued").state == "released"


def test_a_task_without_a_key_cannot_be_enqueued_once(app: Celery) -> None:
    @app.task(name="plain")
    def plain() -> None: ...

    with pytest.raises(InvalidArgument, match="it has no key"):
        plain.delay_once()


# -- bad options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("once", "problem"),
    [
        ({"lease": "1s"}, "names no key"),
        (["{order}"], "neither a template nor a dict"),
        (lambda order: order, "neither a template nor a dict"),
        ({"key": "{order}", "backoff": "soon"}, "backoff"),
        ("{invoice}", "is not a parameter"),
        ({"key": "{order}", "lease": -1}, "lease"),
        ({"key": "{order}", "scope": "payments"}, "the scope is the task's name"),
        ({"key": "{order}", "on_error": "x"}, "on_error='x'"),
        ({"key": "{order}", "fingerprint": ["total"]}, "is not a parameter"),
    ],
)
def test_a_bad_option_is_refused_when_the_task_is_added(app: Celery, once: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):

        @app.task(name="charge", once=once, lazy=False)
        def charge(order: str) -> None: ...


def test_an_attribute_of_a_model_is_refused_because_a_dict_is_sent(app: Celery) -> None:
    with pytest.raises(InvalidArgument, match=r"dict has no attribute .id"):

        @app.task(name="charge", once="{order.id}", pydantic=True, lazy=False)
        def charge(order: Order) -> None: ...


def test_an_async_task_is_refused(app: Celery) -> None:
    with pytest.raises(InvalidArgument, match="Celery awaits no task"):

        @app.task(name="charge", once="{order}", lazy=False)
        async def charge(order: str) -> None: ...


def test_debounce_needs_its_base(app: Celery) -> None:
    with pytest.raises(InvalidArgument, match=r"debounce.*base=debounced_tasks"):

        @app.task(name="charge", debounce={"key": "{order}"}, lazy=False)
        def charge(order: str) -> None: ...


def test_a_class_without_a_gate_is_refused(broker: str) -> None:
    def charge(order: str) -> None: ...

    app = Celery("tests", broker=broker, task_cls=OnceTask, set_as_current=False)
    with pytest.raises(InvalidArgument, match=r"once=.*task_cls=once_tasks\(gate\)"):
        app.task(name="charge", once="{order}", lazy=False, shared=False)(charge)
    with pytest.raises(InvalidArgument, match=r"debounce=.*base=debounced_tasks\(gate\)"):
        app.task(
            name="index", base=DebouncedTask, debounce={"key": "{order}"}, lazy=False, shared=False,
        )(charge)  # fmt: skip


def test_bad_defaults_are_refused_at_once(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="lease"):
        once_tasks(gate, lease=-1)
    with pytest.raises(InvalidArgument, match="backoff"):
        once_tasks(gate, backoff="soon")
    with pytest.raises(TypeError, match="leas"):
        once_tasks(gate, leas="1s")  # type: ignore[call-arg]


def test_a_parameter_of_the_name_keep_is_refused(app: Celery) -> None:
    with pytest.raises(InvalidArgument, match="parameter `keep`"):

        @app.task(name="charge", once="{keep}", lazy=False)
        def charge(keep: str) -> None: ...
