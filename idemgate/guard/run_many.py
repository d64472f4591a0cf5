"""The batch of a guard: its claims travel together, and so do its completions. The steps are those of `call`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar, cast

from idemgate.core.backoff import to_async
from idemgate.core.calls import PerKeyCall
from idemgate.core.clock import monotonic
from idemgate.core.keys import Key
from idemgate.core.validation import call_async, call_blocking, check_int, check_iterable
from idemgate.core.verdict import Verdict
from idemgate.core.waits import is_cancelled
from idemgate.errors import IdemgateError, InvalidArgument, LeaseLost, MissingKey, StoreError
from idemgate.guard.acquire import ReplyOrError, acquire_many, acquire_many_async
from idemgate.guard.call import (
    add_run_trace,
    answer_duplicate,
    claim_in_process,
    end_without_store,
    ending_of_failure,
    ending_of_result,
    is_late,
    may_start,
    record_claim,
    record_end,
    record_unended,
    renew,
    renew_async,
    replayed_trace,
    start_lease,
    unfinished_of,
)
from idemgate.guard.context import GuardContext
from idemgate.guard.current import get_current, get_held, hold, set_current, set_held
from idemgate.guard.heartbeat import Heartbeat
from idemgate.guard.judge import judge
from idemgate.guard.keep import AioKeeper, Keep, Keeper
from idemgate.guard.request import (
    COMPLETES,
    KEEP,
    RELEASE,
    UNDO,
    Duplicate,
    End,
    Ending,
    Grant,
    Request,
    build_ending,
    lease_lost_error,
)
from idemgate.store.context import Context, Tracer

__all__ = ["run_many", "run_many_async"]

R = TypeVar("R")
T = TypeVar("T")


class _Run(Generic[T]):
    """A message to run. It has no heartbeat if the store is away and `on_store_error` lets it run.

    A late renewal replaces the grant. `ran` is True once the handler was called, and `end` is set once its claim ended.
    `trace` is that of its step, for a tracer.
    """

    __slots__ = ("end", "grant", "heartbeat", "message", "position", "ran", "trace")

    def __init__(self, position: int, message: T, grant: Grant, heartbeat: Heartbeat | None) -> None:
        self.position = position
        self.message = message
        self.grant = grant
        self.heartbeat = heartbeat
        self.ran = False
        self.end: End | None = None
        self.trace: bytes = b""


class _MessageBatch(Generic[T, R]):
    """The messages of one call of `run_many`, and what is known of each, by its index.

    `alone` are the messages that run one by one after the batch: copies, those that wait for another owner, and those
    without a valid key. `results` are the ends of the handlers.
    """

    def __init__(
        self, guard: GuardContext, messages: Iterable[tuple[Key | None, T]], build_request: BuildRequest
    ) -> None:
        self.guard = guard
        self.messages = [
            _check_pair(index, pair) for index, pair in enumerate(check_iterable(messages, "messages", _PAIRS))
        ]
        self.requests: dict[int, Request] = {}
        self.alone: list[int] = []
        self.runs: list[_Run[T]] = []
        self.results: dict[int, tuple[R | None, BaseException | None]] = {}
        self.verdicts: dict[int, Verdict[R]] = {}
        options, records = guard.options, set[bytes]()
        apart = options.at_most_once or options.shadow or guard.cache is not None or options.sink is not None
        for index, (key, message) in enumerate(self.messages):
            request = None if apart else build_request(key, None, (message,))
            if isinstance(request, Request) and request.record[0] not in records:
                records.add(request.record[0])
                self.requests[index] = request
            else:  # without a valid key `Guard.run` gives the verdict
                self.alone.append(index)

    def apply_replies(self, outcomes: Sequence[ReplyOrError], sent_at: float) -> None:
        """Apply the replies to the claims: start the heartbeats of those that were granted."""
        for (index, request), outcome in zip(self.requests.items(), outcomes, strict=True):
            if isinstance(outcome, StoreError):  # the value under this key is no record
                self.verdicts[index] = judge(request, (None, outcome, None, None, False))
            elif outcome.state == "in_progress" and request.wait:
                self.alone.append(index)
            else:
                answer = record_claim(self.guard, request, outcome, sent_at, evictions=0)
                try:
                    self._add(index, answer)
                except IdemgateError as error:  # a corrupt checkpoint
                    self.verdicts[index] = judge(request, (None, error, answer, None, False))

    def apply_store_error(self, error: StoreError) -> None:
        """Apply `on_store_error` to all messages."""
        for index, request in self.requests.items():
            try:
                self._add(index, claim_in_process(self.guard, request, error))
            except StoreError as raised:
                self.verdicts[index] = judge(request, (None, raised, None, None, False))

    def _add(self, index: int, answer: Grant | Duplicate) -> None:
        """Add a message to run, or the verdict on a duplicate."""
        if isinstance(answer, Duplicate):
            request = self.requests[index]
            account = answer_duplicate(self.guard, request, answer)
            self.verdicts[index] = verdict = judge(request, account)
            if (tracer := self.guard.context.tracer) is not None:
                with tracer.once(request.options.scope, request.key) as step:
                    step.note(verdict, replayed_trace(account))
            return
        heartbeat = None
        if answer.guarded_by == "lease":
            heartbeat = cast(Heartbeat, start_lease(self.guard.context, answer, with_current=False))
            heartbeat.__enter__()
        self.runs.append(_Run(index, self.messages[index][1], answer, heartbeat))

    def needs_renewal(self, run: _Run[T]) -> bool:
        """Return True if less than half of the lease of a run is left. Raise LeaseLost if it is known to be lost."""
        if run.heartbeat is None:
            return False
        if run.heartbeat.execution.lease_lost:
            may_start(self.guard.context, run.grant, "lost")
            raise lease_lost_error(run.grant)
        return is_late(run.grant.request, run.heartbeat.last)

    def refuse(self, run: _Run[T], error: IdemgateError) -> None:
        """Set the verdict on a message that may not start."""
        self.verdicts[run.position] = judge(run.grant.request, (None, error, run.grant, None, False))

    def choose_running(self) -> Callable[[_Run[T]], AbstractContextManager[None]]:
        """Return `running`, or with a tracer `running_traced`."""
        tracer = self.guard.context.tracer
        return self.running if tracer is None else functools.partial(self.running_traced, tracer)

    @contextmanager
    def running(self, run: _Run[T]) -> Generator[None]:
        """Make `current()` work while a handler runs. End a run that has no lease."""
        run.ran = True
        if run.heartbeat is None:
            with start_lease(self.guard.context, run.grant):
                try:
                    yield
                except BaseException as error:
                    run.end = end_without_store(
                        self.guard, run.grant, ending_of_failure(self.guard, run.grant, None, error)
                    )
                    raise
            run.end = end_without_store(self.guard, run.grant, self._decide_end(run))
        else:
            previous = get_current()
            try:
                set_current(run.heartbeat.execution)
                yield
            finally:
                set_current(previous)
                run.heartbeat.end_work()

    @contextmanager
    def running_traced(self, tracer: Tracer, run: _Run[T]) -> Generator[None]:
        """Do the same in a step. It ends with the handler, so it does not know whether the claim was lost."""
        request, error = run.grant.request, None
        with tracer.once(request.options.scope, request.key) as step:
            run.trace = step.trace
            try:
                with self.running(run):
                    yield
            except Exception as raised:  # noqa: BLE001 - raised again below
                error = raised
            value = None if error else self.results[run.position][0]
            step.note(judge(request, (value, error, run.grant, None, True)))
        if error is not None:
            raise error

    def build_ends(self) -> tuple[list[tuple[_Run[T], Ending]], list[PerKeyCall[bool]]]:
        """Return the claims to end, in the order of the calls that end them. A message that did not run is released."""
        guard, most = self.guard, self.guard.context.batch_size
        ends: dict[bytes, list[tuple[_Run[T], Ending]]] = {kind: [] for kind in (*COMPLETES, RELEASE, UNDO)}
        for run in self.runs:
            if run.heartbeat is None or run.end is not None:
                continue
            ending = self._decide_end(run)
            if ending is None or ending[0] == KEEP:
                run.end = End(KEEP)
            else:
                ends[ending[0]].append((run, add_run_trace(run.trace, ending) if run.trace else ending))
        retention, calls = guard.options.retention, list[PerKeyCall[bool]]()
        for kind in COMPLETES:
            completions = [
                (run.grant.request.record[0], run.grant.request.owner, run.grant.reply.token, retention, ending[1])
                for run, ending in ends[kind]
            ]
            calls += guard.claims.complete_each(completions, most, kind)
        for kind in (RELEASE, UNDO):
            releases = [
                (run.grant.request.record[0], run.grant.request.owner, retention, ending[1])
                for run, ending in ends[kind]
            ]
            calls += guard.claims.release_each(releases, most, undo=kind == UNDO)
        return [one for ended in ends.values() for one in ended], calls

    def _decide_end(self, run: _Run[T]) -> Ending | None:
        """Return what the end of a run stores. A message that did not run is released, and counts as no attempt."""
        if run.position not in self.results:
            interrupted = KEEP if self.guard.options.holds_interrupted else RELEASE
            return build_ending(interrupted if run.ran else UNDO)
        value, error = self.results[run.position]
        if error is None:
            ending = ending_of_result(self.guard, run.grant, None, value)
            if (unfinished := unfinished_of(ending)) is not None:
                self.results[run.position] = (None, unfinished)
            return ending
        return ending_of_failure(self.guard, run.grant, None, error)

    def record_ends(self, ended: Sequence[tuple[_Run[T], Ending]], outcomes: Sequence[bool | StoreError]) -> None:
        """Record the replies to the ends."""
        for (run, ending), outcome in zip(ended, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                run.end = record_unended(self.guard, run.grant, ending, outcome)
            else:
                run.end = record_end(self.guard, run.grant, ending, outcome)

    def owns(self, context: Context, record: tuple[bytes]) -> bool:
        """Return whether the batch holds the claim of a record, which it completes after its last handler."""
        return self.guard.context.endpoint == context.endpoint and any(
            run.heartbeat is not None
            and run.end is None
            and not run.heartbeat.execution.lease_lost
            and run.grant.request.record == record
            for run in self.runs
        )

    def has_lost_all(self) -> bool:
        """Return True if no message is left whose lease is not lost."""
        return all(run.heartbeat is not None and run.heartbeat.execution.lease_lost for run in self.runs)

    def leave(self) -> None:
        """Stop the heartbeats and judge the messages that ran."""
        for run in self.runs:
            if run.heartbeat is not None:
                run.heartbeat.__exit__()
            if run.position in self.results:
                value, error = self.results[run.position]
                self.verdicts[run.position] = judge(run.grant.request, (value, error, run.grant, run.end, True))


def run_many(
    guard: GuardContext,
    messages: Iterable[tuple[Key | None, T]],
    handler: Callable[[T], R],
    keep: Callable[[float], object] | None,
    build_request: BuildRequest,
    run: AloneRunner,
) -> list[Verdict[R]]:
    """Run a batch; see `Guard.run_many`. `run` runs a message that is not part of it."""
    batch = _MessageBatch[T, R](guard, messages, build_request)
    with nullcontext() if keep is None else Keeper(guard.context.counters, guard.options, keep) as keeper:
        _run_together(batch, handler, keeper)
    for index in batch.alone:
        key, message = batch.messages[index]
        batch.verdicts[index] = run(key, handler, message, keep=keep)
    return [batch.verdicts[index] for index in range(len(batch.messages))]


def _run_together(batch: _MessageBatch[T, R], handler: Callable[[T], R], keeper: Keeper | None) -> None:
    """Run the messages whose claims travel together."""
    guard, around, running = batch.guard, get_held(), batch.choose_running()
    try:
        try:
            sent_at = monotonic()
            batch.apply_replies(acquire_many(guard.context, [*batch.requests.values()]), sent_at)
        except StoreError as error:
            batch.apply_store_error(error)
        hold(batch)
        if keeper is not None and batch.runs:
            keeper.start_work(batch.has_lost_all)
        for one in batch.runs:
            work = functools.partial(guard.retry.copy(), handler) if guard.retry else handler
            try:
                if batch.needs_renewal(one):
                    one.grant = renew(guard.context, one.grant)
            except (LeaseLost, StoreError) as error:
                batch.refuse(one, error)
                continue
            try:
                with running(one):
                    batch.results[one.position] = call_blocking(work, (one.message,), {}), None
            except Exception as error:  # noqa: BLE001 - the verdict has it
                batch.results[one.position] = None, error
    finally:
        try:
            _end(batch)
        except BaseException:  # of a signal handler: what has run must be completed all the same
            _end(batch)
            raise
        finally:
            set_held(around)
            batch.leave()


def _end(batch: _MessageBatch[Any, Any]) -> None:
    """Complete or release the claims of a batch that are not ended."""
    ended, calls = batch.build_ends()
    batch.record_ends(ended, batch.guard.context.link.run_each(calls, *batch.guard.end_timeouts))


async def run_many_async(
    guard: GuardContext,
    messages: Iterable[tuple[Key | None, T]],
    handler: Callable[[T], Awaitable[R]],
    keep: Keep | None,
    concurrency: int,
    build_request: BuildRequest,
    run: AloneRunner,
) -> list[Verdict[R]]:
    """Run a batch; see `AioGuard.run_many`."""
    places = asyncio.Semaphore(check_int("concurrency", concurrency, 1))
    batch = _MessageBatch[T, R](guard, messages, build_request)
    async with nullcontext() if keep is None else AioKeeper(guard.context.counters, guard.options, keep) as keeper:
        await _run_together_async(batch, handler, keeper, places)
    for index in batch.alone:
        key, message = batch.messages[index]
        batch.verdicts[index] = await run(key, handler, message, keep=keep)
    return [batch.verdicts[index] for index in range(len(batch.messages))]


async def _run_together_async(
    batch: _MessageBatch[T, R],
    handler: Callable[[T], Awaitable[R]],
    keeper: AioKeeper | None,
    places: asyncio.Semaphore,
) -> None:
    """Run the messages whose claims travel together."""
    guard, running = batch.guard, batch.choose_running()
    try:
        sent_at = monotonic()
        batch.apply_replies(await acquire_many_async(guard.context, [*batch.requests.values()]), sent_at)
    except StoreError as error:
        batch.apply_store_error(error)

    async def run_one(one: _Run[T]) -> None:
        work = functools.partial(to_async(guard.retry), handler) if guard.retry else handler
        async with places:
            if not await _may_start(batch, one):
                return
            try:
                with running(one):
                    batch.results[one.position] = await call_async(work, (one.message,), {}), None
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                batch.results[one.position] = None, error  # raised by the handler
            except Exception as error:  # noqa: BLE001 - the verdict has it
                batch.results[one.position] = None, error

    async def end() -> None:
        try:
            ended, calls = batch.build_ends()
            batch.record_ends(ended, await guard.context.aio_link.start_each(calls, *guard.end_timeouts))
        finally:
            batch.leave()

    around = get_held()
    try:
        hold(batch)
        if keeper is not None and batch.runs:
            keeper.start_work(batch.has_lost_all)
        async with asyncio.TaskGroup() as tasks:
            for one in batch.runs:
                tasks.create_task(run_one(one))
    finally:
        set_held(around)
        await asyncio.shield(guard.context.aio_link.spawn(end()))  # a cancelled caller does not stop it


async def _may_start(batch: _MessageBatch[Any, Any], run: _Run[Any]) -> bool:
    """Return True if the lease of a run suffices to start it, after a renewal if need be."""
    try:
        if batch.needs_renewal(run):
            run.grant = await renew_async(batch.guard.context, run.grant)
    except (LeaseLost, StoreError) as error:
        batch.refuse(run, error)
        return False
    return True


AloneRunner = Callable[..., Any]
"""`Guard.run`, or `AioGuard.run`."""
BuildRequest = Callable[..., Request | MissingKey | Verdict[Any]]
"""A function that gets a key, a fingerprint and the arguments of the handler."""


def _check_pair(index: int, pair: Any) -> tuple[Any, Any]:
    if pair.__class__ is not tuple or len(pair) != 2:
        raise InvalidArgument(f"messages[{index}]", type(pair).__name__, "not a key and a message", _PAIRS)
    return pair


_PAIRS = "Pass (key, message) tuples"
