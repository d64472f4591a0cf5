"""The broker of each test: another database of the store."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import kombu.pools
import pytest
import redis
from celery import Celery, Task, _state
from celery.contrib.testing.worker import start_worker
from idemgate_celery import once_tasks
from kombu.asynchronous import set_event_loop

from idemgate import Gate


@pytest.fixture
def broker(store: str) -> str:
    """The URL of an empty broker, as Celery writes that of a database behind a Unix socket."""
    with redis.Redis.from_url(f"{store}?db=1") as client:
        client.flushdb()
    return store.replace("unix://", "redis+socket://") + "?virtual_host=1"


@pytest.fixture
def app(gate: Gate, broker: str) -> Iterator[Celery]:
    made = build_app(gate, broker)
    yield made
    close_app(made)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Collect the connections that kombu leaves to the garbage collector: a later test would be blamed for them.

    And drop the tasks that an app shared with all later apps of the process, as `@app.task` does.
    """
    shared = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(shared)
    set_event_loop(None)  # else the next worker of Celery 5.5 in this process fires no `eta`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        kombu.pools.reset()
        gc.collect()


@pytest.fixture
def close() -> Callable[[Celery], None]:
    return close_app


def close_app(app: Celery) -> None:
    backend: Any = app.backend
    backend.result_consumer._pubsub = None  # else results connect again when they are collected
    backend.client.connection_pool.disconnect()
    app.close()


sends_models = pytest.mark.skipif(
    not hasattr(Task, "_dump_pydantic_arguments"), reason="Celery before 5.7 sends no models"
)


def build_app(gate: Gate, broker: str, visibility: float = 60, **defaults: Any) -> Celery:
    app = Celery("tests", broker=broker, backend=broker, task_cls=once_tasks(gate, **defaults), set_as_current=False)
    options = {"visibility_timeout": visibility, "unacked_restore_interval": 0.1}
    app.task = functools.partial(app.task, shared=False)  # type: ignore[method-assign]  # else each app of the process has it
    app.conf.update(
        task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True,
        broker_transport_options=options,
    )  # fmt: skip
    return app


@pytest.fixture
def work(app: Celery) -> Callable[..., Any]:
    """`with work():` a worker of this process, whose tasks run in threads."""
    app.log.setup = lambda *_, **__: None  # else it changes levels, handlers and warnings of the whole process
    return lambda: start_worker(app, pool="threads", concurrency=4, perform_ping_check=False, shutdown_timeout=30)
