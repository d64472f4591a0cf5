"""The drivers of a guarded call, one blocking and one async.

They send requests; `ClaimAttempt` decides what to send. The decorator and `gate.guard` are built on them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from idemgate.core.backoff import to_async
from idemgate.core.calls import Call
from idemgate.core.clock import monotonic
from idemgate.core.text import one_line
from idemgate.core.validation import ENDED, call_async, call_blocking, refuse_unfinished
from idemgate.core.verdict import Verdict, verdict_of
from idemgate.errors import (
    DecodeError,
    MissingKey,
    NotDurable,
    StoreError,
    UnexpectedData,
)
from idemgate.guard.acquire import (
    acquire,
    acquire_async,
    renew_before_start,
    renew_before_start_async,
    rollback,
    rollback_async,
)
from idemgate.guard.attempt import ClaimAttempt, DoneCache, DuplicateResult, OnceOptions, OnError, WaitForOwner
from idemgate.guard.claims import ClaimReply, Claims, ReplyState
from idemgate.guard.current import Execution, own_wait_error, use_execution
from idemgate.guard.heartbeat import Heartbeat, end_timeouts, register_scope, wait_for_wakeup
from idemgate.guard.judge import judge, judge_unguarded, record_hook_failure, report_replay, warn_of_model
from idemgate.guard.local import LocalGuard
from idemgate.store.context import Context

if TYPE_CHECKING:
    import tenacity


__all__ = ["COUNTER_NAMES", "Driver"]

log = logging.getLogger("idemgate.once")
R = TypeVar("R")


class Driver:
    """The drivers of all calls that one guard makes: its options, its cache and its local guard."""

    def __init__(
        self, context: Context, options: OnceOptions, retry: tenacity.BaseRetrying | None, cache_size: int
    ) -> None:
        self.context = context
        self.options = options
        self.retry = retry
        self.cache = DoneCache(cache_size, monotonic if context.clock is None else context.now) if cache_size else None
        if self.cache is not None:
            context.caches.add(self.cache)
        self.local = LocalGuard()
        context.note_scope(options.scope, options.retention)
        self._warned_of_model = False
        self.end_timeouts = end_timeouts(context, options.lease)

    @functools.cached_property
    def claims(self) -> Claims:
        """The builder of the calls. It is built at the first call, since `configure` may still change the namespace."""
        register_scope(self.context, self.options.scope, self.options.retention)
        return Claims(self.context.namespace, self.context.clock)

    # Without a key

    def runs_without_key(self, error: MissingKey) -> bool:
        """Apply `on_missing_key`: return True to run unguarded and False to skip the call, or raise the error."""
        policy = self.options.on_missing_key
        if policy == "raise":
            raise error
        self.context.counters.add(f"once.missing_key.{policy}")
        log.warning("once.missing_key scope=%s policy=%s", self.options.scope, policy, extra={"policy": policy})
        return policy == "run"

    def run_without_key(
        self, error: MissingKey, wrapped: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Verdict[R]:
        """Apply `on_missing_key` and return the verdict."""
        if (verdict := self._judge_without_key(error)) is not None:
            return verdict
        try:
            return judge_unguarded(call_blocking(wrapped, args, kwargs))
        except Exception as failure:  # noqa: BLE001 - the verdict has it
            return judge_unguarded(None, failure)

    async def run_without_key_async(
        self, error: MissingKey, wrapped: Callable[..., Awaitable[R]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Verdict[R]:
        """Apply `on_missing_key` and return the verdict; see `run_without_key`."""
        if (verdict := self._judge_without_key(error)) is not None:
            return verdict
        try:
            return judge_unguarded(await call_async(wrapped, args, kwargs))
        except Exception as failure:  # noqa: BLE001 - the verdict has it
            return judge_unguarded(None, failure)

    def _judge_without_key(self, error: MissingKey) -> Verdict[Any] | None:
        """Return the verdict on a message without a key, or None to run it unguarded."""
        try:
            return None if self.runs_without_key(error) else Verdict("skipped")
        except MissingKey as missing:
            return verdict_of(missing)

    # Blocking driver

    def run(
        self, attempt: ClaimAttempt, wrapped: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Verdict[R]:
        """Run one guarded call and return its verdict. Cancellation, KeyboardInterrupt and SystemExit are raised."""
        try:
            return judge(attempt, self.execute(attempt, wrapped, args, kwargs))
        except Exception as error:  # noqa: BLE001 - the verdict has it
            return judge(attempt, None, error)

    def execute(
        self, attempt: ClaimAttempt, wrapped: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> R:
        """Claim the key and run the work. Return its result or that of a duplicate, or raise the error of either."""
        work = functools.partial(self.retry.copy(), wrapped) if self.retry else wrapped
        duplicate, guarded = self._acquire(attempt)
        if duplicate is not None and not (self.options.shadow and self._record_shadowed(attempt)):
            replayed = self.options.on_replay is not None
            return self.answer(attempt, duplicate) if replayed else duplicate.unwrap()  # type: ignore[no-any-return]
        attempt.ran = True
        if duplicate is not None or not guarded or self.options.at_most_once:
            with self.hold_without_lease(attempt, guarded or duplicate is not None) as local:
                result = call_blocking(work, args, kwargs)
                if local:
                    attempt.encode_result(result)
            return result
        with self.start_heartbeat(attempt) as heartbeat:
            try:
                result = work(*args, **kwargs)
                if result.__class__ not in ENDED:  # inlined `call_blocking`
                    refuse_unfinished(result)
            except BaseException as error:
                heartbeat.end_work()
                failed = self.build_failure(attempt, error)
                if failed is not None:
                    self._end_claim(attempt, failed)
                raise
            try:
                heartbeat.end_work()
                self._end_claim(attempt, attempt.build_completion(result), done=True)
            except BaseException:  # of a signal handler: the work has run, so its completion must be sent all the same
                if not attempt.ended:
                    self._end_claim(attempt, attempt.build_completion(result), done=True)
                raise
        if attempt.lost or attempt.interruption is not None:
            attempt.raise_after_end()
        return result

    def _acquire(self, attempt: ClaimAttempt) -> tuple[DuplicateResult | None, bool]:
        """Claim the key of one call.

        Return the result of a duplicate, or None to run, and whether the store guards the run.
        """
        if self.cache is not None and (cached := self._lookup(self.cache, attempt)) is not None:
            return cached, True
        context = self.context
        try:
            try:  # as `acquire`, inlined for speed
                entry = (context._link or context.link).run(attempt.build_claim())
            except NotDurable:
                rollback(context, attempt)
                raise
            outcome = attempt.interpret_reply(entry)
            if isinstance(outcome, WaitForOwner):
                outcome = self._wait(attempt)
            duplicate = self.record_entry(attempt, outcome)
            if duplicate is None and attempt.needs_renewal:
                renew_before_start(context, attempt)
        except StoreError as error:
            return self.apply_store_policy(attempt, error), False
        return duplicate, True

    def _wait(self, attempt: ClaimAttempt) -> DuplicateResult | None:
        """Wait until the other owner ends. Return the result of a duplicate, or None to run."""
        if (error := own_wait_error(self.context, attempt, attempt.entry.left_ms)) is not None:
            return DuplicateResult(error=error)
        with self.context.link.waiting(attempt.record[0]) as waiter:
            # Claim again after subscribing, because the owner may have ended before the subscription.
            while isinstance(outcome := attempt.interpret_reply(acquire(self.context, attempt)), WaitForOwner):
                waiter.wait(outcome.seconds)
        return outcome

    def _end_claim(self, attempt: ClaimAttempt, call: Call[bool], done: bool = False) -> None:
        """Send the end of a claim. Count a store error instead of raising it.

        The work has run, so an error must not make the caller run it again.
        """
        context = self.context
        try:
            held = (context._link or context.link).run(call, *self.end_timeouts)
        except StoreError as error:
            self.record_unended(attempt, error)
        else:
            self.record_end(attempt, held, done)

    # Async driver

    async def run_async(
        self,
        attempt: ClaimAttempt,
        wrapped: Callable[..., Awaitable[R]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Verdict[R]:
        """Run one guarded call and return its verdict; see `run`."""
        try:
            return judge(attempt, await self.execute_async(attempt, wrapped, args, kwargs))
        except Exception as error:  # noqa: BLE001 - the verdict has it
            return judge(attempt, None, error)

    async def execute_async(  # noqa: C901 - as `execute`; each coroutine less counts
        self,
        attempt: ClaimAttempt,
        wrapped: Callable[..., Awaitable[R]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        """Claim the key and run the work; see `execute`."""
        work: Callable[..., Awaitable[R]] = wrapped
        if self.retry:
            work = functools.partial(cast("Callable[..., Awaitable[R]]", to_async(self.retry)), wrapped)
        duplicate, guarded = await self._acquire_async(attempt)
        if duplicate is not None and not (self.options.shadow and self._record_shadowed(attempt)):
            replayed = self.options.on_replay is not None
            return self.answer(attempt, duplicate) if replayed else duplicate.unwrap()  # type: ignore[no-any-return]
        attempt.ran = True
        if duplicate is not None or not guarded or self.options.at_most_once:
            with self.hold_without_lease(attempt, guarded or duplicate is not None) as local:
                result = await call_async(work, args, kwargs)
                if local:
                    attempt.encode_result(result)
            return result
        with self.start_heartbeat(attempt) as heartbeat:
            try:
                result = await work(*args, **kwargs)
                if result.__class__ not in ENDED:
                    refuse_unfinished(result)
            except BaseException as error:
                heartbeat.end_work()
                failed = self.build_failure(attempt, error)
                if failed is not None:
                    await self._end_claim_async(attempt, heartbeat, failed)
                raise
            try:
                heartbeat.end_work()
                await self._end_claim_async(attempt, heartbeat, attempt.build_completion(result), done=True)
            except BaseException:  # of a signal handler, as in `execute`; a cancellation has handed the heartbeat over
                if not (attempt.ended or heartbeat.is_handed_over):
                    await self._end_claim_async(attempt, heartbeat, attempt.build_completion(result), done=True)
                raise
        if attempt.lost or attempt.interruption is not None:
            attempt.raise_after_end()
        return result

    async def _acquire_async(self, attempt: ClaimAttempt) -> tuple[DuplicateResult | None, bool]:
        """Claim the key of one call; see `_acquire`."""
        if self.cache is not None and (cached := self._lookup(self.cache, attempt)) is not None:
            return cached, True
        context = self.context
        try:
            pending = (context._aio_link or context.aio_link).start(attempt.build_claim())
            try:  # as `acquire_async`, without another coroutine
                entry = await pending.answer
            except (NotDurable, asyncio.CancelledError) as error:
                await rollback_async(context, attempt, pending, error)
                raise
            outcome = attempt.interpret_reply(entry)
            if isinstance(outcome, WaitForOwner):
                outcome = await self._wait_async(attempt)
            duplicate = self.record_entry(attempt, outcome)
            if duplicate is None and attempt.needs_renewal:
                await renew_before_start_async(context, attempt)
        except StoreError as error:
            return self.apply_store_policy(attempt, error), False
        return duplicate, True

    async def _wait_async(self, attempt: ClaimAttempt) -> DuplicateResult | None:
        """Wait until the other owner ends; see `_wait`."""
        if (error := own_wait_error(self.context, attempt, attempt.entry.left_ms)) is not None:
            return DuplicateResult(error=error)
        async with self.context.aio_link.waiting(attempt.record[0]) as wake:
            while isinstance(
                outcome := attempt.interpret_reply(await acquire_async(self.context, attempt)), WaitForOwner
            ):
                await wait_for_wakeup(wake, outcome.seconds)
        return outcome

    async def _end_claim_async(
        self, attempt: ClaimAttempt, heartbeat: Heartbeat, call: Call[bool], done: bool = False
    ) -> None:
        """Send the end of a claim; see `_end_claim`.

        If the caller is cancelled, a background task renews the lease until the reply.
        """
        link = self.context._aio_link or self.context.aio_link
        pending = link.start(call, *self.end_timeouts)
        try:
            held = await pending.answer
        except StoreError as error:
            self.record_unended(attempt, error)
        except asyncio.CancelledError:
            heartbeat.hand_over()
            link.spawn(self._record_end_later(attempt, heartbeat, pending.outcome(), done))
            raise
        else:
            self.record_end(attempt, held, done)

    async def _record_end_later(
        self, attempt: ClaimAttempt, heartbeat: Heartbeat, pending: asyncio.Future[bool], done: bool
    ) -> None:
        """Wait for the reply to the end of a cancelled call, then stop its heartbeat."""
        try:
            self.record_end(attempt, await pending, done)
        except StoreError as error:
            self.record_unended(attempt, error)
        finally:
            heartbeat.stop()

    # Shared by both drivers

    def _lookup(self, cache: DoneCache, attempt: ClaimAttempt) -> DuplicateResult | None:
        """Return the result of a duplicate from the cache, or None."""
        attempt.evictions = cache.evictions
        cached = cache.lookup(attempt.record[0], attempt.fingerprint)
        if cached is None:
            return None
        self.context.counters.add_each("once.remembered", COUNTER_NAMES[cached.entry.state])
        return attempt.answer_from_cache(cached)

    def record_entry(self, attempt: ClaimAttempt, outcome: DuplicateResult | None) -> DuplicateResult | None:
        """Count the reply to a claim, and cache a done key."""
        entry = attempt.entry
        if entry.state == "started":
            self.context.counters.add("once.started")
            if entry.taken_over:
                self.context.counters.add("once.taken_over")
                facts = attempt.log_facts()
                log.warning(
                    "once.taken_over scope=%r key=%r token=%d attempt=%d", *facts.values(), entry.token, entry.attempt,
                    extra=facts | {"token": entry.token, "attempt": entry.attempt},
                )  # fmt: skip
        else:
            self.context.counters.add(COUNTER_NAMES[entry.state])
            if self.cache is not None and entry.state == "done" and entry.left_ms > 0:
                _store_in_cache(self.cache, attempt, entry, entry.left_ms)
        return outcome

    def answer(self, attempt: ClaimAttempt, duplicate: DuplicateResult) -> Any:
        """Return what a duplicate gets, or raise its error. Call `on_replay` with the verdict on it."""
        if self.options.on_replay is not None:
            report_replay(self.context, self.options.on_replay, attempt, duplicate)
        return duplicate.unwrap()

    def build_failure(self, attempt: ClaimAttempt, error: BaseException) -> Call[bool] | None:
        """Build the call that follows a failure of the work. Release the claim if `on_error` itself fails."""
        return None if (policy := self.decide_failure(attempt, error)) == "keep" else attempt.build_failure(policy)

    def decide_failure(self, attempt: ClaimAttempt, error: BaseException) -> OnError:
        """Apply `on_error` to an exception of the work.

        If `on_error` is a function and fails, release the claim: the caller needs the error of the work, and its retry.
        """
        try:
            return attempt.decide_failure(error)
        except Exception as broken:  # noqa: BLE001 - a function of the user may raise anything
            if not callable(self.options.on_error):  # a signal handler raised; the policy holds all the same
                return attempt.decide_failure(error)
            record_hook_failure(self.context, attempt, "on_error", broken)
            error.add_note(f"idemgate released the key, because on_error failed: {type(broken).__name__}")
            return "release"

    def end_kept(self, attempt: ClaimAttempt, result: object, error: BaseException | None = None) -> Verdict[Any]:
        """End a claim that `on_error` kept: store the result, or apply `on_error` to the later error. Blocking.

        Return the verdict. Renew the lease with `start_heartbeat` as long as the claim is kept.
        """
        if error is None:
            self._end_claim(attempt, attempt.build_completion(result), done=True)
        elif (call := self.build_failure(attempt, error)) is not None:
            self._end_claim(attempt, call)
        return judge(attempt, result, error)

    def _record_shadowed(self, attempt: ClaimAttempt) -> bool:
        """Count and log a duplicate that runs because of `shadow`."""
        self.context.counters.add("once.shadowed")
        facts, state = attempt.log_facts(), attempt.entry.state
        log.info("once.would_drop scope=%r key=%r state=%s", *facts.values(), state, extra=facts | {"state": state})
        return True

    def start_heartbeat(self, attempt: ClaimAttempt, with_current: bool = True) -> Heartbeat:
        """Renew the lease until the block is left. `current()` works while the work runs."""
        entry = attempt.entry
        recovered = self.context.codec.decode(entry.checkpoint) if entry.checkpoint else None
        execution = Execution(self.context, attempt, entry.token, entry.attempt, recovered)
        return Heartbeat(self.context, attempt, execution, with_current)

    @contextmanager
    def hold_without_lease(self, attempt: ClaimAttempt, guarded: bool) -> Generator[bool]:
        """Run with `at_most_once`, in shadow mode, or without the store.

        Yield True if the result of the block must be encoded, because this process's guard stores it.
        """
        local = not guarded and self.options.on_store_error == "local"
        with (
            use_execution(self._execution_without_lease(attempt)),
            self.local.hold(attempt, self.decide_failure) if local else nullcontext(),
        ):
            yield local

    def _execution_without_lease(self, attempt: ClaimAttempt) -> Execution:
        """Return the execution for `current()` of a run without a lease."""
        entry = attempt.entry
        token, number = (entry.token, entry.attempt) if entry.state == "started" else (0, 1)
        return Execution(self.context, attempt, token, number, saves=self.options.shadow)

    def apply_store_policy(self, attempt: ClaimAttempt, error: StoreError) -> DuplicateResult | None:
        """Apply `on_store_error`: raise, run unguarded, or guard the run within this process."""
        policy = self.options.on_store_error
        if policy == "raise" or isinstance(error, UnexpectedData | DecodeError):
            raise error
        attempt.entry = ClaimReply("unasked")  # a claim that was granted may have failed to renew
        self.context.counters.add(f"once.store_error.{policy}")
        facts = attempt.log_facts()
        log.error(
            "once.store_error scope=%r key=%r policy=%s: %s", *facts.values(), policy, one_line(error),
            extra=facts | {"policy": policy, "error": str(error)},
        )  # fmt: skip
        if policy == "run":
            return None
        if (entry := self.local.claim(attempt)) is None:
            return None
        attempt.wait = None  # no store would end the wait
        return cast("DuplicateResult", attempt.interpret_reply(entry))

    def record_end(self, attempt: ClaimAttempt, held: bool, done: bool) -> None:
        """Count the reply to the end of a claim, and cache a completed key."""
        attempt.ended, attempt.lost = True, not held
        if not held:
            self.context.counters.add("once.lease_lost")
            facts = attempt.log_facts()
            log.warning("once.lease_lost scope=%r key=%r", *facts.values(), extra=facts)
        elif done:
            self.context.counters.add("once.completed")
            if attempt.result[0] == b"n":
                self.context.counters.add("once.result_not_stored")
                facts = attempt.log_facts()
                log.warning("once.result_not_stored scope=%r key=%r", *facts.values(), extra=facts)
            if attempt.loses_model and not self._warned_of_model:
                self._warned_of_model = True
                warn_of_model(attempt)
            if self.cache is not None:
                _store_in_cache(self.cache, attempt, attempt.build_done_entry(), self.options.retention)

    def record_unended(self, attempt: ClaimAttempt, error: StoreError) -> None:
        """Count and log a store error at the end of a claim."""
        attempt.ended, attempt.unended = True, error
        name = "once.not_durable" if isinstance(error, NotDurable) else "once.completion_lost"
        self.context.counters.add(name)
        facts = attempt.log_facts()
        log.error("%s scope=%r key=%r: %s", name, *facts.values(), one_line(error), extra=facts | {"error": str(error)})


COUNTER_NAMES = {state: f"once.{state}" for state in get_args(ReplyState)}
"""The counter of each reply to a claim."""


def _store_in_cache(cache: DoneCache, attempt: ClaimAttempt, entry: ClaimReply, milliseconds: int) -> None:
    """Cache a done key, unless this process decided about a key since the claim was sent."""
    cache.store(attempt.record[0], attempt.fingerprint, entry, milliseconds, attempt.evictions)
