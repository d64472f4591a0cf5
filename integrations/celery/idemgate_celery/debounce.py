"""The class of tasks whose calls merge: a call triggers a topic, and the delivery of the topic enqueues the task."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from celery import Celery, Task, signals

from idemgate import Delivery, Gate, InvalidArgument, Receipt
from idemgate.core.validation import type_hints
from idemgate.types import TopicOptions, check_gate

__all__ = ["Debounce", "DebouncedTask", "debounced_tasks", "deliver_in_workers"]

if TYPE_CHECKING:
    BaseTask: TypeAlias = Task[Any, Any]
else:
    BaseTask = Task  # before Celery 5.7 it takes no types
_TRIGGER = {"countdown": "delay", "eta": "at", "priority": "priority"}
"""Options of `apply_async` that a trigger has, too, and their names there."""


class Debounce(TopicOptions, total=False):
    """What `debounce=` of a task holds: the options of `Gate.topic`, and these."""

    key: str | Callable[..., object]
    """The key whose calls merge: a template of the task's arguments, or a callable. Required."""
    name: str
    """The name of the topic. Default: that of the task."""


class DebouncedTask(BaseTask):
    """A task whose calls merge. `debounced_tasks` makes the class."""

    abstract = True
    debounce: Debounce | None = None
    gate: ClassVar[Gate]
    _merged: ClassVar[Any] = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Declare the topic when Celery adds the task to its app. Raises InvalidArgument."""
        super().on_bound(app)
        if cls.debounce is None or cls._merged is not None:
            return
        if (once := getattr(cls, "once", None)) is not None:
            fix = "Call a function with gate.once in the task"
            raise InvalidArgument("once", once, "a merged call has no key of its own", fix)
        if not hasattr(cls, "gate"):
            fix = "Pass base=debounced_tasks(gate)"
            raise InvalidArgument("debounce", cls.debounce, "its class has no gate", fix)
        if not isinstance(cls.debounce, dict):
            raise InvalidArgument("debounce", cls.debounce, "not a dict", 'Pass debounce={"key": "{product}", ...}')
        options = cast("dict[str, Any]", {"name": cls.name, **cls.debounce})
        if "deliver" in options:
            raise InvalidArgument("debounce", cls.debounce, "a delivery enqueues the task", "Drop deliver")
        if "key" not in options:
            raise InvalidArgument(
                "debounce", cls.debounce, "it names no key", 'Pass debounce={"key": "{product}", ...}'
            )
        is_bound = not isinstance(inspect.getattr_static(cls, "run"), staticmethod)
        run = MethodType(cls.run, cls) if is_bound else cls.run  # without `self` in its signature
        cls._merged = cls.gate.merge(deliver=cls._enqueue, **options)(declare_sent(cls, run))

    @classmethod
    def _enqueue(cls, delivery: Delivery[dict[str, Any]]) -> None:
        """Enqueue the task of a delivery. Another attempt of the delivery enqueues it under the same id."""
        app: Any = cls.app
        task = app.tasks[cls.name]
        Task.apply_async(task, kwargs=delivery.payload, task_id=delivery.id)

    def apply_async(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any
    ) -> Any:
        """Trigger the topic and return the receipt.

        `countdown`, `eta` and `priority` are those of the trigger. A call with an id is enqueued at once: a retry, and
        a member of a chain, group or chord. So is each call with `task_always_eager`.

        Raises:
            InvalidArgument: another option. Those of the queue belong to the task (`queue=`, `expires=` ...).
        """
        if self.debounce is None or task_id is not None or self.app.conf.task_always_eager:
            return super().apply_async(args, kwargs, task_id, **options)
        given = {name: value for name, value in options.items() if value is not None}
        if unknown := given.keys() - _TRIGGER.keys():
            name = min(unknown)
            raise InvalidArgument(name, given[name], "calls merge, so it has no meaning for one", "Set it on the task")
        trigger = self._merged.with_options(**{_TRIGGER[name]: value for name, value in given.items()}).trigger
        args, kwargs = dump_models(self, args or (), kwargs or {})
        receipt: Receipt = trigger(*args, **kwargs)
        return receipt


def dump_models(task: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call as a worker gets them: Celery 5.7 dumps models, with `pydantic=True`."""
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return (args, kwargs) if dump is None or task.serializer == "pickle" else dump(args, kwargs)


def declare_sent(task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the work of a task, annotated as it is sent: with `pydantic=True` a dict for each model, and no result."""
    part: Any = run
    while part is not None and getattr(part, "__globals__", {}).get("__name__") != "celery.app.base":
        part = getattr(part, "__wrapped__", None)
    if part is None:  # not in the wrapper of `pydantic=True`
        return run

    @functools.wraps(run)
    def work(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    work.__annotations__ = {
        name: dict if hasattr(hint, "model_fields") and task.serializer != "pickle" else hint
        for name, hint in type_hints(run).items()
        if name != "return" and isinstance(hint, type)
    }
    return work


def debounced_tasks(gate: Gate) -> type[DebouncedTask]:
    """Return the base of tasks whose calls merge.

    `@app.task(base=debounced_tasks(gate), debounce={"key": "{product}", "quiet": "5s", "max_delay": "1m"})`: each call
    triggers a topic of the gate, with the arguments as payload. When a key was quiet, a worker of the gate enqueues the
    task once for all its calls. `merge` says what becomes of the arguments, such as {"fields": "union", "*": "last"}.
    The task then runs in its own queue, with its own limits and retries.

    A delivery that is repeated enqueues the same id again. A task that must not run twice calls a function with `once`.
    Declare the tasks in the program that runs the worker of the gate; see `deliver_in_workers`.

    Args:
        gate: the gate whose store has the topics.

    Raises:
        InvalidArgument: `gate` is no Gate. When Celery adds a task: an option of the task is invalid.
    """
    check_gate(gate)

    class GateTask(DebouncedTask):
        abstract = True

    GateTask.gate = gate
    return GateTask


def deliver_in_workers(gate: Gate, **options: Any) -> None:
    """Let each Celery worker deliver the topics of a gate, in a thread of its main process.

    Without it run `gate.run()`, or `idemgate run`, in a program of its own.

    Args:
        gate: the gate of `debounced_tasks`.
        **options: see `gate.aio.worker`.
    """
    check_gate(gate)
    worker = _Deliveries(gate, options)
    signals.worker_ready.connect(worker.start, weak=False)
    signals.worker_shutting_down.connect(worker.stop, weak=False)


class _Deliveries:
    """A worker of a gate in a thread."""

    def __init__(self, gate: Gate, options: dict[str, Any]) -> None:
        self._gate = gate
        self._options = options
        self._stop: Callable[[], object] | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, **_: Any) -> None:
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._work, name="idemgate-worker", daemon=True)
            self._thread.start()

    def stop(self, **_: Any) -> None:
        """Stop taking messages, and wait for what is being enqueued."""
        self._stopping = True  # the thread may not have come to its event loop yet
        thread, self._thread = self._thread, None
        if thread is not None:
            if self._stop is not None:
                with suppress(RuntimeError):  # the thread has ended by an error
                    self._stop()
            thread.join(10)

    def _work(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        if self._stopping:
            stop.set()
        try:
            async with self._gate.aio.worker(**self._options):
                await stop.wait()
        finally:
            await self._gate.aio.close()
