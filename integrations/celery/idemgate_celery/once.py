"""The class of tasks that run once per key."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Unpack, cast

from celery import Celery, signals
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult

from idemgate import AlreadyInProgress, Gate, InvalidArgument, Verdict
from idemgate.core.backoff import delays
from idemgate.core.validation import is_async
from idemgate.core.verdict import error_of_run
from idemgate.errors import ResultUnavailable
from idemgate.guard.options import OnError, check_choice
from idemgate.types import BackoffPolicy, GuardOptions, check_gate
from idemgate_celery.debounce import BaseTask, DebouncedTask, declare_sent, dump_models
from idemgate_celery.visibility import Visibility

__all__ = ["OnceTask", "TaskOnce", "once_tasks"]

_CONTROL = (Ignore, Reject, Retry)
"""Exceptions by which a task tells Celery what to do with its message."""
_LIKE = 'Pass once="{order[id]}", or a dict with "key"'
_QUEUED = "{}:queued"
"""The scope of the keys that `delay_once` has enqueued, from the name of the task."""
_PREFIX = 18
"""The characters of an id of `delay_once` that follow from its key. The others are random."""


class TaskOnce(GuardOptions, total=False):
    """What `once=` of a task may hold: the options of `Gate.once`, and these."""

    key: str | Callable[..., object]
    """The key: a template of the task's arguments, or a callable. Required."""
    fingerprint: Sequence[str] | Callable[..., object] | None
    """Names of arguments, or a callable: the same key with another fingerprint fails."""
    backoff: BackoffPolicy
    """The delays before a task that is in progress elsewhere, or that failed, is tried again. Default: 10 seconds."""


class OnceTask(BaseTask):
    """A task that runs once per key, if it has `once`. `once_tasks` makes the class of an app's tasks."""

    abstract = True
    once: str | TaskOnce | None = None
    gate: ClassVar[Gate]
    once_defaults: ClassVar[TaskOnce] = {}

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check `once` when Celery adds the task to its app. Raises InvalidArgument."""
        super().on_bound(app)
        if (debounce := getattr(cls, "debounce", None)) is not None and not issubclass(cls, DebouncedTask):
            fix = "Pass base=debounced_tasks(gate), too"
            raise InvalidArgument("debounce", debounce, "calls of this task do not merge", fix)
        if cls.once is None:
            return
        if not hasattr(cls, "gate"):
            raise InvalidArgument("once", cls.once, "its class has no gate", "Pass task_cls=once_tasks(gate)")
        if not isinstance(cls.once, str | dict):
            raise InvalidArgument("once", cls.once, "neither a template nor a dict", _LIKE)
        options = cls._once_options()
        if "key" not in options:
            raise InvalidArgument("once", cls.once, "it names no key", _LIKE)
        if "scope" in options:
            raise InvalidArgument("once", cls.once, "the scope is the task's name", "Drop scope, or name the task so")
        if not callable(decided := options.get("on_error", "release")):
            check_choice("on_error", decided, OnError)
        if is_async(cls.run):
            raise InvalidArgument("once", cls.name, "an async function, and Celery awaits no task", "Use a plain one")
        if "keep" in inspect.signature(cls.run).parameters:
            raise InvalidArgument("once", cls.name, "its task has a parameter `keep`", "Give it another name")
        cls._guard(cls.run)

    @classmethod
    def _once_options(cls) -> TaskOnce:
        given: TaskOnce = {"key": cls.once} if isinstance(cls.once, str) else cls.once or {}
        return {**cls.once_defaults, **given}

    @classmethod
    def _guard(cls, run: Callable[..., Any]) -> Any:
        """Return the guarded work of the task."""
        options = cast("dict[str, Any]", cls._once_options())
        delays(options.pop("backoff", None))
        if not options.get("at_most_once"):
            options["on_error"] = functools.partial(_decide, options.get("on_error", "release"))
        return cls.gate.once(scope=cls.name, **options)(declare_sent(cls, run))

    @functools.cached_property
    def _guarded(self) -> Any:
        return self._guard(self.run)  # not at the binding: `autoretry_for` replaces `run` after it

    @functools.cached_property
    def _visibility(self) -> Visibility:
        app: Any = self.app  # whose tasks share a connection
        found: Visibility = vars(app).setdefault("_idemgate_visibility", Visibility(app))
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task once per key. Celery calls this in a worker; `task(...)` and `task.apply(...)` do, too."""
        if self.once is None:
            return super().__call__(*args, **kwargs)
        request = self.request
        args, kwargs = dump_models(self, args, kwargs)
        in_worker = not (request.called_directly or request.is_eager)
        verdict: Verdict[Any] = self._guarded.verdict(*args, keep=self._find_keep() if in_worker else None, **kwargs)
        error = verdict.error
        if error is not None and isinstance(told := error_of_run(error), _CONTROL):
            raise told  # after the last attempt, too: Celery has enqueued the retry, whose run is refused
        if self._fails(verdict):  # for the last time
            verdict = verdict._replace(outcome="rejected")
        if in_worker:
            self.gate.record_settlement(self.name, verdict, request.id)
        if isinstance(error, ResultUnavailable) and self._passes_result(in_worker):
            raise error
        if verdict.action == "ack":
            return verdict.value
        if not in_worker and error is None:  # `on_in_progress="skip"`
            return None
        if verdict.action == "reject" or not in_worker:
            assert error is not None
            raise error
        raise self._send_again(verdict)

    def _passes_result(self, in_worker: bool) -> bool:
        """Return whether the result of this run is read: by its caller, the backend, or a task that follows."""
        request = self.request
        if not in_worker or request.callbacks or request.chain or request.chord:
            return True
        return not (request.ignore_result or self.ignore_result or isinstance(self.backend, DisabledBackend))

    def _fails(self, verdict: Verdict[Any]) -> bool:
        """Return whether a failure of the task is Celery's: the guard retries only what it counts by `max_attempts`."""
        return verdict.outcome == "failed" and verdict.ran and self._once_options().get("max_attempts") is None

    def _send_again(self, verdict: Verdict[Any]) -> Exception:
        """Enqueue the task again and return what tells Celery so. A wait does not use up the task's own retries."""
        request = self.request
        backoff = self._once_options().get("backoff", 10.0)
        delay = verdict.delay(backoff)
        if verdict.outcome == "in_progress":  # the other run may end long before its lease
            delay = min(delay, verdict._replace(retry_after=None).delay(backoff))
        error = verdict.error or AlreadyInProgress("", delay, self.name)
        counted = verdict.outcome == "failed" and verdict.ran
        message = self.signature_from_request(request, countdown=delay, retries=request.retries + counted)
        try:
            message.apply_async()
        except Exception as lost:  # noqa: BLE001 - of any broker
            self.gate.record_settlement(self.name, verdict, request.id, error=lost)
            return Reject(lost, requeue=True)
        return Retry(exc=error, when=cast("Any", delay), sig=message)

    def _find_keep(self) -> Callable[[float], None] | None:
        """Return the function that hides the message of this run in its broker, if it is Redis and still has it."""
        properties: dict[str, Any] = self.request.properties or {}
        tag = properties.get("delivery_tag")
        if not self.acks_late or tag is None or self._visibility.seconds is None:
            return None
        return functools.partial(self._visibility.keep, tag)

    # -- enqueue once -------------------------------------------------------------------------------------------------

    def delay_once(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Enqueue the task unless one with its key was enqueued before. Return the result of the first.

        Three round trips for a new key, one for a copy. The key may be enqueued again when its task has failed or was
        revoked, or after `retention`. That task has another id, so workers do not take it for the revoked one, and its
        result is not the old failure. A task that `delay` enqueued is not known here; it does not run twice either.

        Raises:
            MissingKey, InvalidArgument: the arguments hold no key, or no valid one.
            AlreadyInProgress: another process enqueues this key, and has not ended within 10 s.
            StoreError: the store does not answer.
        """
        if self.once is None:
            raise InvalidArgument("task", self.name, "it has no key", 'Declare it with once="{order[id]}"')
        args, kwargs = dump_models(self, args, kwargs)
        key = self._guarded.key(*args, **kwargs)
        if self.app.conf.task_always_eager:  # the guard runs it once
            return self.apply_async(args, kwargs)
        task_id = self._id_prefix(key) + str(uuid.uuid4())[_PREFIX:]
        options = self._once_options()
        queued = self.gate.guard(
            _QUEUED.format(self.name), retention=options.get("retention", "24h"), on_in_progress="wait", wait="10s"
        )
        verdict = queued.run(key, lambda: self.apply_async(args, kwargs, task_id=task_id).id)
        if verdict.action != "ack" and verdict.error is not None:
            raise verdict.error  # without one it is enqueued, and has failed already: its key is forgotten
        return self.AsyncResult(verdict.value or task_id)

    def _id_prefix(self, key: object) -> str:
        """Return how the ids of the tasks begin that `delay_once` enqueues for a key."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.gate.namespace}/{self.name}/{key!r}"))[:_PREFIX]

    def _forget_queued(self, task_id: str | None, args: Any, kwargs: Any) -> None:
        """Let `delay_once` enqueue the key of a task that has ended without success."""
        if self.once is None or args is None or task_id is None:
            return
        try:
            key = self._guarded.key(*args, **(kwargs or {}))
        except InvalidArgument:  # it has no key, so `delay_once` did not enqueue it
            return
        if not task_id.startswith(self._id_prefix(key)):
            return
        scope = _QUEUED.format(self.name)
        record = self.gate.inspect(key, scope=scope)
        if record.state != "done" or record.value == task_id:  # not an earlier task of the key
            self.gate.forget(key, scope=scope, force=True)


def once_tasks(gate: Gate, **defaults: Unpack[TaskOnce]) -> type[OnceTask]:
    """Return the class of an app's tasks: `Celery("shop", task_cls=once_tasks(gate))`.

    A task with `once` runs once per key, in all workers: `@app.task(once="{order[id]}")`. Or with options:
    `once={"key": "{order[id]}", "fingerprint": ["order[total]"], "max_attempts": 5}`. Tasks without it are usual ones.

    | what happens | in the worker |
    |---|---|
    | the task returned, or was done before | success, with the result of the first run |
    | done before, and the gate could not store its result | ResultUnavailable. Success, if the result is ignored |
    | another worker runs its key, or the store is away | retried by `backoff`; the task's own retries stay |
    | the task raised | as in Celery: failure, or its own retry. With `max_attempts`: retried by `backoff` until then |
    | no key, the same key with another fingerprint, attempts exhausted | failure, with that error |
    | `self.replace(...)`, `raise Ignore()` | done; a copy gets None |
    | `self.retry(...)`, `raise Reject(...)` | the key is free, and Celery does what they say |

    On a Redis broker a task with `acks_late` is not redelivered while it runs, however long that takes. No task is
    redelivered while it waits in a worker for its `eta` or `countdown`.

    A task that is called (`task(order)`), or runs eagerly, raises the errors of the guard instead of a retry.

    Args:
        gate: the gate whose store has the keys. Workers that are forked open their own connections.
        **defaults: options of all tasks; see `TaskOnce` and `Gate.once`.

    Raises:
        InvalidArgument: an option is invalid. Celery adds tasks late, and those of a task are checked then: at their
            first use, or when a worker starts.
        TypeError: there is no option of this name.
    """
    check_gate(gate)
    delays(defaults.get("backoff"))
    of_guard = cast(
        "Any", {name: each for name, each in defaults.items() if name not in ("key", "fingerprint", "backoff")}
    )
    gate.once(scope="tasks", **of_guard)

    class GateTask(OnceTask):
        abstract = True

    GateTask.gate, GateTask.once_defaults = gate, defaults

    def on_received(request: Any, **_: Any) -> None:
        if isinstance(request.task, GateTask) and request.task.once is not None and request.eta is not None:
            request.task._visibility.hold_until(request.message, request.eta.timestamp())

    def on_failure(sender: Any, **facts: Any) -> None:
        # A copy of a task that has succeeded may fail, because its result was not stored
        if isinstance(sender, GateTask) and not isinstance(facts["exception"], ResultUnavailable):
            sender._forget_queued(facts["task_id"], facts["args"], facts["kwargs"])

    def on_revoked(sender: Any, **facts: Any) -> None:
        if isinstance(sender, GateTask):
            sender._forget_queued(facts["request"].id, facts["request"].args, facts["request"].kwargs)

    signals.task_received.connect(on_received, weak=False)
    signals.task_failure.connect(on_failure, weak=False)
    signals.task_revoked.connect(on_revoked, weak=False)
    return GateTask


def _decide(policy: Any, error: BaseException) -> Any:
    """Return what an exception of the task does to its key."""
    if isinstance(error, Ignore):
        return "complete"
    if isinstance(error, _CONTROL):
        return "release"
    return policy(error) if callable(policy) else policy
