"""The batch of a guard: its claims travel together, and so do its completions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from idemgate.core.backoff import to_async
from idemgate.core.calls import PerKeyCall
from idemgate.core.keys import Key
from idemgate.core.validation import call_async, call_blocking, check_int, check_iterable
from idemgate.core.verdict import Verdict
from idemgate.errors import IdemgateError, InvalidArgument, LeaseLost, StoreError
from idemgate.guard.acquire import (
    ReplyOrError,
    acquire_many,
    acquire_many_async,
    may_start,
    renew_before_start,
    renew_before_start_async,
)
from idemgate.guard.attempt import ClaimAttempt, DuplicateResult, WaitForOwner, build_release_calls
from idemgate.guard.current import use_execution
from idemgate.guard.driver import Driver
from idemgate.guard.heartbeat import Heartbeat
from idemgate.guard.judge import judge

__all__ = ["AloneRunner", "run_many", "run_many_async"]

R = TypeVar("R")
T = TypeVar("T")


class _Run(NamedTuple, Generic[T]):
    """A message to run. It has no heartbeat if the store is away and `on_store_error` lets it run."""

    position: int
    message: T
    attempt: ClaimAttempt
    heartbeat: Heartbeat | None


class _Batch(Generic[T, R]):
    """The messages of one call of `run_many`, and what is known of each, by its index.

    `alone` are the messages that run one by one after the batch: copies, those that wait for another owner, and those
    without a valid key. `results` are the ends of the handlers.
    """

    def __init__(self, driver: Driver, messages: Iterable[tuple[Key, T]]) -> None:
        self.driver = driver
        self.messages = [
            _check_pair(index, pair) for index, pair in enumerate(check_iterable(messages, "messages", _PAIRS))
        ]
        self.attempts: dict[int, ClaimAttempt] = {}
        self.alone: list[int] = []
        self.runs: list[_Run[T]] = []
        self.results: dict[int, tuple[R | None, BaseException | None]] = {}
        self.verdicts: dict[int, Verdict[R]] = {}
        options, records = driver.options, set[bytes]()
        apart = options.at_most_once or options.shadow or driver.cache is not None or options.sink is not None
        for index, (key, _) in enumerate(self.messages):
            attempt = None if apart else _build_attempt(driver, key)
            if attempt is None or attempt.record[0] in records:
                self.alone.append(index)
            else:
                records.add(attempt.record[0])
                self.attempts[index] = attempt

    def apply_replies(self, outcomes: Sequence[ReplyOrError]) -> None:
        """Apply the replies to the claims: start the heartbeats of those that were granted."""
        for (index, attempt), outcome in zip(self.attempts.items(), outcomes, strict=True):
            try:
                if isinstance(outcome, StoreError):
                    raise outcome  # the value under this key is no record
                decision = attempt.interpret_reply(outcome)
                if isinstance(decision, WaitForOwner):
                    self.alone.append(index)
                    continue
                self.driver.record_entry(attempt, decision)
                heartbeat = None if decision else self.driver.start_heartbeat(attempt, with_current=False)
                self._add(index, attempt, decision, heartbeat)
            except IdemgateError as error:
                self.verdicts[index] = judge(attempt, None, error)

    def apply_store_error(self, error: StoreError) -> None:
        """Apply `on_store_error` to all messages."""
        for index, attempt in self.attempts.items():
            try:
                self._add(index, attempt, self.driver.apply_store_policy(attempt, error), None)
            except StoreError as raised:
                self.verdicts[index] = judge(attempt, None, raised)

    def _add(
        self, index: int, attempt: ClaimAttempt, duplicate: DuplicateResult | None, heartbeat: Heartbeat | None
    ) -> None:
        """Add a message to run, or the verdict on a duplicate."""
        if duplicate is None:
            if heartbeat is not None:
                heartbeat.__enter__()
            self.runs.append(_Run(index, self.messages[index][1], attempt, heartbeat))
            return
        try:
            self.verdicts[index] = judge(attempt, self.driver.answer(attempt, duplicate))
        except IdemgateError as error:
            self.verdicts[index] = judge(attempt, None, error)

    def needs_renewal(self, run: _Run[T]) -> bool:
        """Return True if less than half of the lease of a run is left. Raise LeaseLost if it is known to be lost."""
        if run.heartbeat is None:
            return False
        run.attempt.leased_at = run.heartbeat.last
        if run.heartbeat.execution.lease_lost:
            may_start(self.driver.context, run.attempt, run.heartbeat.last, "lost")
            raise run.attempt.build_lease_lost()
        return run.attempt.needs_renewal

    def refuse(self, run: _Run[T], error: IdemgateError) -> None:
        """Set the verdict on a message that may not start."""
        self.verdicts[run.position] = judge(run.attempt, None, error)

    @contextmanager
    def running(self, run: _Run[T]) -> Generator[None]:
        """Make `current()` work while a handler runs."""
        run.attempt.ran = True
        if run.heartbeat is None:
            with self.driver.hold_without_lease(run.attempt, guarded=False) as local:
                yield
                if local:
                    run.attempt.encode_result(self.results[run.position][0])
        else:
            with use_execution(run.heartbeat.execution):
                try:
                    yield
                finally:
                    run.heartbeat.end_work()

    def build_ends(self) -> tuple[list[ClaimAttempt], list[PerKeyCall[bool]]]:
        """Return the claims to end, in the order of the calls that end them. A message that did not run is released."""
        driver, most = self.driver, self.driver.context.batch_size
        released: list[ClaimAttempt] = []
        completed: dict[bytes, list[ClaimAttempt]] = {b"v": [], b"n": [], b"e": []}
        for run in self.runs:
            if run.heartbeat is None or run.attempt.ended:
                continue
            policy = self._decide_end(run)
            if policy == "store":
                completed[run.attempt.result[0]].append(run.attempt)
            elif policy in ("release", "share"):
                released.append(run.attempt)
        calls: list[PerKeyCall[bool]] = []
        for kind, attempts in completed.items():
            calls += driver.claims.complete_each([attempt.completion() for attempt in attempts], most, kind)
        ordered = [attempt for attempts in completed.values() for attempt in attempts]
        return ordered + released, calls + build_release_calls(released, most)

    def _decide_end(self, run: _Run[T]) -> str:
        """Encode the result of a run, and return what its claim gets: a choice of `on_error`."""
        if run.position not in self.results:
            return "keep" if run.attempt.ran and run.attempt.holds_interrupted else "release"
        value, error = self.results[run.position]
        if error is None:
            run.attempt.encode_result(value)
            return "store"
        return self.driver.decide_failure(run.attempt, error)

    def record_ends(self, attempts: Sequence[ClaimAttempt], outcomes: Sequence[bool | StoreError]) -> None:
        """Record the replies to the ends."""
        for attempt, outcome in zip(attempts, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                self.driver.record_unended(attempt, outcome)
            else:
                self.driver.record_end(attempt, outcome, done=attempt.result[0] in (b"v", b"n"))

    def leave(self) -> None:
        """Stop the heartbeats and judge the messages that ran."""
        for run in self.runs:
            if run.heartbeat is not None:
                run.heartbeat.__exit__()
            if run.position in self.results:
                self.verdicts[run.position] = judge(run.attempt, *self.results[run.position])


def run_many(
    driver: Driver, messages: Iterable[tuple[Key, T]], handler: Callable[[T], R], run: AloneRunner
) -> list[Verdict[R]]:
    """Run a batch; see `Guard.run_many`. `run` runs a message that is not part of it."""
    batch = _Batch[T, R](driver, messages)
    try:
        try:
            batch.apply_replies(acquire_many(driver.context, [*batch.attempts.values()]))
        except StoreError as error:
            batch.apply_store_error(error)
        for one in batch.runs:
            work = functools.partial(driver.retry.copy(), handler) if driver.retry else handler
            try:
                if batch.needs_renewal(one):
                    renew_before_start(driver.context, one.attempt)
            except (LeaseLost, StoreError) as error:
                batch.refuse(one, error)
                continue
            try:
                with batch.running(one):
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
            batch.leave()
    for index in batch.alone:
        key, message = batch.messages[index]
        batch.verdicts[index] = run(key, handler, message)
    return [batch.verdicts[index] for index in range(len(batch.messages))]


def _end(batch: _Batch[Any, Any]) -> None:
    """Complete or release the claims of a batch that are not ended."""
    attempts, calls = batch.build_ends()
    batch.record_ends(attempts, batch.driver.context.link.run_each(calls, *batch.driver.end_timeouts))


async def run_many_async(
    driver: Driver,
    messages: Iterable[tuple[Key, T]],
    handler: Callable[[T], Awaitable[R]],
    concurrency: int,
    run: AloneRunner,
) -> list[Verdict[R]]:
    """Run a batch; see `AioGuard.run_many`."""
    places = asyncio.Semaphore(check_int("concurrency", concurrency, 1))
    batch = _Batch[T, R](driver, messages)
    try:
        batch.apply_replies(await acquire_many_async(driver.context, [*batch.attempts.values()]))
    except StoreError as error:
        batch.apply_store_error(error)

    async def run_one(one: _Run[T]) -> None:
        work = functools.partial(to_async(driver.retry), handler) if driver.retry else handler
        async with places:
            if not await _may_start(batch, one):
                return
            try:
                with batch.running(one):
                    batch.results[one.position] = await call_async(work, (one.message,), {}), None
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                batch.results[one.position] = None, error  # raised by the handler; the batch was not cancelled
            except Exception as error:  # noqa: BLE001 - the verdict has it
                batch.results[one.position] = None, error

    async def end() -> None:
        try:
            attempts, calls = batch.build_ends()
            batch.record_ends(attempts, await driver.context.aio_link.start_each(calls, *driver.end_timeouts))
        finally:
            batch.leave()

    try:
        async with asyncio.TaskGroup() as tasks:
            for one in batch.runs:
                tasks.create_task(run_one(one))
    finally:
        await asyncio.shield(driver.context.aio_link.spawn(end()))  # a cancelled caller does not stop it
    for index in batch.alone:
        key, message = batch.messages[index]
        batch.verdicts[index] = await run(key, handler, message)
    return [batch.verdicts[index] for index in range(len(batch.messages))]


async def _may_start(batch: _Batch[Any, Any], run: _Run[Any]) -> bool:
    """Return True if the lease of a run suffices to start it, after a renewal if need be."""
    try:
        if batch.needs_renewal(run):
            await renew_before_start_async(batch.driver.context, run.attempt)
    except (LeaseLost, StoreError) as error:
        batch.refuse(run, error)
        return False
    return True


AloneRunner = Callable[..., Any]
"""`Guard.run`, or `AioGuard.run`."""


def _build_attempt(driver: Driver, key: Key) -> ClaimAttempt | None:
    """Return the attempt, or None for an invalid key, on which `Guard.run` gives the verdict."""
    try:
        return ClaimAttempt(driver.options, driver.claims, key, b"")
    except InvalidArgument:
        return None


def _check_pair(index: int, pair: Any) -> tuple[Any, Any]:
    if pair.__class__ is not tuple or len(pair) != 2:
        raise InvalidArgument(f"messages[{index}]", type(pair).__name__, "not a key and a message", _PAIRS)
    return pair


_PAIRS = "Pass (key, message) tuples"
