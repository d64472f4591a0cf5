"""The context that all parts of one gate share: its namespace, its limits, and its links to the store."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar
from weakref import WeakSet

from idemgate.core.activity import Activity
from idemgate.core.calls import MAX_ENTRIES
from idemgate.core.clock import Clock, monotonic
from idemgate.core.codec import Codec
from idemgate.core.counters import Counters
from idemgate.core.forks import lock_reset_at_fork, run_in_child
from idemgate.core.scopes import DefaultScopes
from idemgate.core.verdict import Verdict
from idemgate.errors import NotConfigured
from idemgate.store.durability import Durability
from idemgate.store.heartbeat import HeartbeatThread
from idemgate.store.lifespan import Lifespans

if TYPE_CHECKING:
    from idemgate.store.aio import AsyncLink
    from idemgate.store.endpoint import Endpoint
    from idemgate.store.sync import SyncLink

__all__ = [
    "MAX_TRACE", "Bound", "Cache", "Context", "HasContext", "Observer", "Runner", "Running", "Step",
    "Tracer", "trace", "trace_async", "url_to_open",
]  # fmt: skip

log: logging.Logger = logging.getLogger("idemgate.worker")
T = TypeVar("T")

MAX_TRACE = 600
"""The most bytes of a trace: a `traceparent` of 55 characters and a `tracestate` of 512 fit."""
MAX_SCOPES = 100
"""The most scopes that a gate remembers, to look for a key that is absent in one of them, and to register them."""


class Cache(Protocol):
    """A cache of decoded records."""

    def evict(self, record: bytes) -> None:
        """Remove the record from the cache."""
        ...


class Running(NamedTuple):
    """A delivery or a guarded call that runs now.

    `of` is its topic or scope. `since` is when it began, seconds of `monotonic`. `runs_in` is the task that runs it, or
    the id of a thread. `max_run` is that of a guarded call in ms, 0 without a limit; None of a delivery.
    """

    of: str
    key: str
    since: float
    runs_in: object
    max_run: int | None = None


class Runner(NamedTuple):
    """A worker, or the runner of the subscribers.

    Attributes:
        role: "worker" or "subscriber".
        serves: Says whether it serves a topic of this name that is declared before its start; None means a subscriber.
        topics: Returns the topics that it serves.
        places: Returns how many handlers run, and how many may run.
        running: Returns the deliveries whose handlers run now. Any thread may call it.
        replied_at: Returns when the store answered a poll last, seconds of `monotonic`. Subscribers do not poll.
    """

    role: str
    serves: Callable[[str | None], bool]
    topics: Callable[[], Sequence[str]] = tuple
    places: Callable[[], tuple[int, int]] = lambda: (0, 0)
    running: Callable[[], Iterable[Running]] = tuple
    replied_at: Callable[[], float] = monotonic


class Runners:
    """The workers and the runners of subscribers that run now. They serve what was declared before they started."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._running: list[Runner] = []

    @contextmanager
    def running(self, runner: Runner) -> Generator[None]:
        """Register a runner while the block runs."""
        self._running.append(runner)
        try:
            yield
        finally:
            self._running.remove(runner)

    def now(self) -> tuple[Runner, ...]:
        """Return those that run now. Any thread may call it."""
        return tuple(self._running)

    def warn_if_late(self, what: str, topic: str | None, name: str) -> None:
        """Count and log a declaration that a runner would serve if it had been made before its start."""
        if any(what == "lifespan" or runner.serves(topic) for runner in self.now()):
            self._counters.add("worker.declared_late")
            facts = {"declared": what, "name": name}
            log.warning(
                "worker.declared_late declared=%s name=%s: it is not served by what runs already. "
                "Declare it before the worker or the subscribers start, or start another one", *facts.values(),
                extra={"declared": what, "declared_name": name},
            )  # fmt: skip


class Bound(Protocol):
    """An object that has built something from the store, the namespace or the clock of its context."""

    def _rebind(self) -> None:
        """Build it again at the next use."""
        ...


class Observer(Protocol):
    """Observes whether this process uses a gate (`idemgate/presence`)."""

    def begin(self) -> None:
        """Note that the store is used from now on: by a call before which there was none, or none in this process."""
        ...

    def end(self) -> None:
        """Note that the gate is closed. Called before its connections are."""
        ...


Redact = Callable[[str, str], str]
"""Returns what the store may hold of a text. It gets "key" or "error", and the text."""


class Notes(Protocol):
    """Notes that wait to be sent in the background."""

    def flush(self) -> None:
        """Send it now, with one try, because the gate is closed."""
        ...


class Step(Protocol):
    """A step that began. Its block ends it, also if it raises.

    Attributes:
        trace: What is stored with a trigger or a result, so that a later step can name this one. At most 600 bytes
            (MAX_TRACE). b"" stores nothing.
    """

    @property
    def trace(self) -> bytes: ...

    def note(self, outcome: Any, replayed: bytes = b"") -> None:
        """Note the outcome: the receipts of triggers, or the verdict on a delivery or on a guarded call.

        `replayed` is the trace that was stored with the result of an earlier run, if a call replays one.
        """
        ...


class Tracer(Protocol):
    """Observes the steps of a gate: set it as `gate.context.tracer`. Its methods must not raise.

    A worker and a subscriber ask for it when they start.
    """

    def trigger(self, topic: str, triggers: Sequence[Any], sends: bool = True) -> AbstractContextManager[Step]:
        """Begin to send triggers. `sends` is False for one that is packed only, to be stored elsewhere."""
        ...

    def process(self, delivery: Any) -> AbstractContextManager[Step]:
        """Begin the handler of a delivery. `delivery.traces` are those of its triggers."""
        ...

    def consume(self, source: str) -> AbstractContextManager[Step]:
        """Begin the callback of a subscriber for one message of its stream, list, channel or pattern."""
        ...

    def once(self, scope: str, key: Any) -> AbstractContextManager[Step]:
        """Begin a guarded call: before its claim, or in a batch when its handler starts."""
        ...

    def run_trace(self) -> bytes:
        """Return the trace of the guarded call that runs in this task or thread, to be stored with its result."""
        ...

    def record_settlements(
        self, topic: str, settlements: Sequence[Any], outcomes: Sequence[str], seconds: float
    ) -> None:
        """Note deliveries that were settled by one call, which took this long.

        An outcome is "ok", "dead", "cancelled", "lost", or "unknown" after an error of the store.
        """
        ...


Begin = Callable[[T], AbstractContextManager[Step]]


def trace(run: Callable[[T], Verdict[Any]], begin: Begin[T]) -> Callable[[T], Verdict[Any]]:
    """Return a function that runs in a step and notes its verdict."""

    def run_traced(item: T) -> Verdict[Any]:
        with begin(item) as step:
            verdict = run(item)
            step.note(verdict)
            return verdict

    return run_traced


def trace_async(
    run: Callable[[T], Awaitable[Verdict[Any]]], begin: Begin[T]
) -> Callable[[T], Coroutine[Any, Any, Verdict[Any]]]:
    """Return a coroutine function that runs in a step and notes its verdict."""

    async def run_traced(item: T) -> Verdict[Any]:
        with begin(item) as step:
            verdict = await run(item)
            step.note(verdict)
            return verdict

    return run_traced


class Context:
    """The shared state of one gate. Creating it opens no connection; the first use of a link does.

    `timeout` is in seconds. `counters` count in this process. `heartbeat` renews leases. A key that is forgotten or
    resolved through this gate is dropped from all `caches`. `scopes` are those of this gate, with their longest
    retention in ms. `registered_scopes` are those that the store knows, or is about to know. `activity` is what the
    gate did lately. `lifespans` are the user's resources for its workers. `observer` is called when the gate is first
    used, and when it is closed. `redact` is the user's function for texts that reports and histories hold. `notes` are
    those of guarded keys that wait to be sent (`idemgate/guard/heartbeat.py`). `tracer` observes each step, for
    distributed tracing. `bound` are the objects that `override` tells. `overridden` is true while a test overrides the
    store.
    """

    observer: Observer | None = None
    redact: Redact | None = None
    notes: Notes | None = None
    tracer: Tracer | None = None
    overridden: bool = False

    def __init__(
        self,
        source: Endpoint | str | None,
        namespace: str,
        timeout: float,
        max_bytes: int,
        durability: Durability | None,
        clock: Clock | None,
    ) -> None:
        self.timeout = timeout
        self.durability = durability
        self.codec: Codec = Codec(max_bytes)
        self.counters: Counters = Counters()
        self.runners: Runners = Runners(self.counters)
        self.lifespans: Lifespans = Lifespans()
        self.caches: WeakSet[Cache] = WeakSet()
        self.bound: WeakSet[Bound] = WeakSet()
        self.default_scopes: DefaultScopes = DefaultScopes()
        self.scopes: dict[str, int] = {}
        self._lock = lock_reset_at_fork(self, "_lock")
        self._set_store(source, namespace, clock)
        _contexts.add(self)

    def _set_store(self, source: Endpoint | str | None, namespace: str, clock: Clock | None) -> None:
        """Set the store, the namespace, the clock and what belongs to them."""
        self.source = source
        self.namespace = namespace
        self.clock = clock
        self.activity: Activity = Activity()
        self.registered_scopes: dict[str, int] = {}
        self.heartbeat: HeartbeatThread = HeartbeatThread(self._heartbeat_link, self.counters)
        # None: its next use calls the observer. The links themselves outlive a fork and a `close`.
        self._link: SyncLink | None = None
        self._aio_link: AsyncLink | None = None
        self._opened_link: SyncLink | None = None
        self._opened_aio_link: AsyncLink | None = None
        self.__dict__.pop("endpoint", None)

    @contextmanager
    def override(self, source: Endpoint | str | None, namespace: str, clock: Clock | None) -> Generator[None]:
        """Use another store, namespace and clock while the block runs. Send no reports. Count from 0. For tests."""
        observer = self.observer
        if observer is not None:  # it would send reports of this namespace to the former store
            observer.end()
        before, counted = self.__dict__.copy(), self.counters.replace({})
        self._set_store(source, namespace, clock)
        self.observer, self.notes, self.overridden = None, None, True
        self._rebind_all()
        try:
            yield
        finally:
            self.close()
            self.__dict__.pop("endpoint", None)
            self.__dict__.update({"observer": None, "notes": None, "overridden": False} | before)
            self.counters.replace(counted)
            self._rebind_all()
            if observer is not None and self.is_used:
                observer.begin()

    def _rebind_all(self) -> None:
        for one in tuple(self.bound):
            one._rebind()

    def __reduce__(self) -> NoReturn:
        from pickle import PicklingError

        raise PicklingError(
            "cannot pickle an object that uses a gate, such as a topic or a guard. Pickle the gate, and make the "
            "object from it in the other process, or define both in a module that the other process imports"
        )

    def note_scope(self, scope: str, retention: int) -> None:
        """Remember a scope of keys that this gate uses, and the retention of its keys in ms."""
        if scope in self.scopes or len(self.scopes) < MAX_SCOPES:
            self.scopes[scope] = max(retention, self.scopes.get(scope, 0))

    def redact_text(self, kind: str, text: str) -> str:
        """Return what the store may hold of a text. If the user's function fails, nothing of it."""
        if self.redact is None:
            return text
        try:
            return str.__str__(self.redact(kind, text))
        except Exception:  # noqa: BLE001 - a function of the user may raise anything
            self.counters.add("presence.redact_failed")
            return "<redact failed>"

    @property
    def is_used(self) -> bool:
        """True once the store was used, so that its address and namespace can no longer change."""
        return "endpoint" in self.__dict__

    @cached_property
    def endpoint(self) -> Endpoint:
        """The endpoint of the store. The first access starts the embedded server if the URL asks for one.

        Raises:
            NotConfigured: no store is configured.
            InvalidArgument: a file of the TLS settings cannot be used.
        """
        from idemgate.store.tls import check_tls_files  # late: importing redis-py is slow

        endpoint = self._find_endpoint()
        check_tls_files(endpoint.settings)
        check_tls_files(endpoint.sentinel_settings)
        return endpoint

    def _find_endpoint(self) -> Endpoint:
        if self.source is not None and not isinstance(self.source, str):
            return self.source
        from idemgate.store.url import endpoint_from_url

        return endpoint_from_url(self.find_url())

    def find_url(self) -> str:
        """Return the URL of a store that is named by one: of an embedded server, that of its socket.

        Raises:
            NotConfigured: no store is configured.
        """
        source = self.source if self.source is not None else os.environ.get("IDEMGATE_URL")
        if source is None or source == "":
            raise NotConfigured(
                "no store is configured. Pass a URL, Gate('redis://localhost:6379/0'); or set IDEMGATE_URL; "
                "or call idemgate.configure(...) for the default gate; or pass a redis-py client; "
                "or Gate('embedded://') for a server of this process"
            )
        assert isinstance(source, str), "an endpoint has no URL"
        return url_to_open(source)

    @property
    def batch_size(self) -> int:
        """The most records of one script call: 1 on a cluster, where each record has its own hash slot."""
        return 1 if self.endpoint.kind == "cluster" else MAX_ENTRIES

    @property
    def link(self) -> SyncLink:
        """The blocking link: `context.link.run(call)`."""
        if self._link is None:
            from idemgate.store.sync import SyncLink

            with self._lock:
                durations = self.activity.calls
                link = self._opened_link or SyncLink(self.endpoint, self.timeout, self.durability, durations)
                self._link = self._opened_link = link
            self._note_use()
            return link
        return self._link

    @property
    def aio_link(self) -> AsyncLink:
        """The asynchronous link: `await context.aio_link.run(call)`."""
        if self._aio_link is None:
            from idemgate.store.aio import AsyncLink

            with self._lock:  # event loops of several threads share one link
                durations = self.activity.calls
                link = self._opened_aio_link or AsyncLink(self.endpoint, self.timeout, self.durability, durations)
                self._aio_link = self._opened_aio_link = link
            self._note_use()
            return link
        return self._aio_link

    def _note_use(self) -> None:
        if self.observer is not None:
            self.observer.begin()

    def note_fork(self) -> None:
        """Let the next use of a link call the observer in this forked child."""
        self._link = self._aio_link = None

    def _heartbeat_link(self) -> SyncLink:
        from idemgate.store.sync import SyncLink

        return SyncLink(self.endpoint, seconds=1.0)

    def now(self) -> float:
        """Return the seconds of the test clock, or of a monotonic clock."""
        return monotonic() if self.clock is None else self.clock.microseconds() / 1_000_000

    def close(self) -> None:
        """Stop the heartbeat thread and close the blocking connections."""
        if self.observer is not None:
            self.observer.end()
        if self.notes is not None and self._opened_link is not None:
            self.notes.flush()
        self.heartbeat.close()
        if self._opened_link is not None:
            self._opened_link.close()
        self._link = self._opened_link = self._aio_link = None

    async def close_aio(self) -> None:
        """Wait for the pending calls, then close the connections of this event loop."""
        if self._opened_aio_link is not None:
            await self._opened_aio_link.close()
        if self.observer is not None and self._opened_link is None:
            from asyncio import to_thread

            self._aio_link = None  # its next use calls the observer
            await to_thread(self.observer.end)


_contexts = WeakSet[Context]()


def _note_fork() -> None:
    for context in tuple(_contexts):
        context.note_fork()


run_in_child(_note_fork)


class HasContext(Protocol):
    """The part of a gate that the lower packages use."""

    @property
    def context(self) -> Context: ...


def url_to_open(url: str) -> str:
    """Return the URL itself, or that of the socket of an embedded server."""
    if not url.startswith("embedded:"):
        return url
    from idemgate.store.embedded.server import shared_server

    return shared_server(url).url
