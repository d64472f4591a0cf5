"""The decorator's two drivers, one blocking and one awaiting. They perform; what to do is decided in `core.passage`."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from idemgate.core.calls import Call
from idemgate.core.functions import awaited
from idemgate.core.key_template import FingerprintSpec, KeySpec
from idemgate.core.keys import Key, record, text_of
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    DecodeError,
    NotDurable,
    ResultUnavailable,
    StoreError,
    UnexpectedData,
)
from idemgate.guard.acquire import asked, claimed, left, undone
from idemgate.guard.attempt import Answer, Guard, Passage, Seen, Wait
from idemgate.guard.calls import Claims, Entry, State
from idemgate.guard.current import Execution, executing
from idemgate.guard.heartbeat import attempt_seconds, beating, woken
from idemgate.guard.local import Local
from idemgate.store.context import Context

if TYPE_CHECKING:
    import tenacity


__all__ = ["Guarded"]

log = logging.getLogger("idemgate.once")
R = TypeVar("R")


class Guarded:
    """One decorated function: which key and fingerprint its arguments have, and the drivers that run it through its
    guard."""

    def __init__(
        self,
        context: Context,
        guard: Guard,
        key: KeySpec,
        fingerprint: FingerprintSpec | None,
        retry: tenacity.BaseRetrying | None,
        remember: int,
    ) -> None:
        self.context = context
        self.claims = Claims(context.namespace, context.clock)
        self.guard = guard
        self.key = key
        self.fingerprint = fingerprint
        self.retry = retry
        self.seen = Seen(remember, monotonic if context.clock is None else context.now) if remember else None
        if self.seen is not None:
            context.caches.add(self.seen)
        self.local = Local()
        self.patience = max(context.timeout, guard.lease / 1000)
        self.attempt = attempt_seconds(guard.lease)

    def wrap(self, func: Any) -> Any:
        """The function behind its guard; signature, name and kind of the function stay as they are."""
        import wrapt  # it looks for entry points, which takes longer than the rest of this package

        inner = getattr(func, "__func__", func)
        return wrapt.FunctionWrapper(func, self.await_call if awaited(inner) else self.call)

    # The blocking driver.

    def call(self, wrapped: Callable[..., R], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        key = self.key.of(instance, args, kwargs)
        fingerprint = b"" if self.fingerprint is None else self.fingerprint.of(instance, args, kwargs)
        if self.seen is not None and (shared := self._shared(self.seen, key, fingerprint)) is not None:
            return shared.value  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
        passage = Passage(self.guard, self.claims, key, fingerprint)
        work = functools.partial(self.retry.copy(), wrapped) if self.retry else wrapped
        answer, guarded = self._enter(passage)
        if answer is not None and not (self.guard.shadow and self._shadowed(passage)):
            return answer.give()  # type: ignore[no-any-return]
        if answer is not None or not guarded or self.guard.at_most_once:
            with self._running_free(passage, guarded or answer is not None):
                return work(*args, **kwargs)
        with self._running(passage) as beats:
            try:
                result = work(*args, **kwargs)
            except BaseException as error:
                beats.end_work()
                failed = passage.fail(error)
                if failed is not None:
                    self._settle_quietly(passage, failed)
                raise
            beats.end_work()
            self._settle_quietly(passage, passage.complete(result), done=True)
        return result

    def _enter(self, passage: Passage) -> tuple[Answer | None, bool]:
        """(what the duplicate gets or None to run, whether the store guards the run)."""
        if self.seen is not None and (known := self._known(self.seen, passage)) is not None:
            return known, True
        context = self.context
        try:
            try:  # as `asked`, without calling it
                entry = (context._link or context.link).run(passage.enter())
            except NotDurable:
                undone(context, passage)
                raise
            verdict = passage.judge(entry)
            if isinstance(verdict, Wait):
                verdict = self._wait(passage)
            return self._noted(passage, verdict), True
        except StoreError as error:
            return self._without_store(passage, error), False

    def _wait(self, passage: Passage) -> Answer | None:
        with self.context.link.waiting(passage.record[0]) as waiter:
            # Subscribed first, then asked once more: what ended in between is not missed.
            while isinstance(verdict := passage.judge(asked(self.context, passage)), Wait):
                waiter.wait(verdict.seconds)
        return verdict

    def _settle_quietly(self, passage: Passage, call: Call[bool], done: bool = False) -> None:
        """Ends a claim. The work has run: that the store is away must not make the caller run it again, so it is
        counted, not raised."""
        context = self.context
        try:
            held = (context._link or context.link).run(call, self.patience, self.attempt)
        except StoreError as error:
            self._unsaved(passage, error)
        else:
            self._settled(passage, held, done)

    # The awaiting driver.

    async def await_call(
        self,
        wrapped: Callable[..., Awaitable[R]],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        key = self.key.of(instance, args, kwargs)
        fingerprint = b"" if self.fingerprint is None else self.fingerprint.of(instance, args, kwargs)
        if self.seen is not None and (shared := self._shared(self.seen, key, fingerprint)) is not None:
            return shared.value  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
        passage = Passage(self.guard, self.claims, key, fingerprint)
        work: Callable[..., Awaitable[R]] = wrapped
        if self.retry:
            work = functools.partial(cast("Callable[..., Awaitable[R]]", _asynchronous(self.retry)), wrapped)
        answer, guarded = await self._await_enter(passage)
        if answer is not None and not (self.guard.shadow and self._shadowed(passage)):
            return answer.give()  # type: ignore[no-any-return]
        if answer is not None or not guarded or self.guard.at_most_once:
            with self._running_free(passage, guarded or answer is not None):
                return await work(*args, **kwargs)
        with self._running(passage) as beats:
            try:
                result = await work(*args, **kwargs)
            except BaseException as error:
                beats.end_work()
                failed = passage.fail(error)
                if failed is not None:
                    await self._await_settle_quietly(passage, beats, failed)
                raise
            beats.end_work()
            await self._await_settle_quietly(passage, beats, passage.complete(result), done=True)
        return result

    async def _await_enter(self, passage: Passage) -> tuple[Answer | None, bool]:
        if self.seen is not None and (known := self._known(self.seen, passage)) is not None:
            return known, True
        try:
            asking = self.context.aio_link.start(passage.enter())
            try:  # as `claimed`, without one more coroutine
                entry = await asking.answer
            except (NotDurable, asyncio.CancelledError) as error:
                await left(self.context, passage, asking, error)
                raise
            verdict = passage.judge(entry)
            if isinstance(verdict, Wait):
                verdict = await self._await_wait(passage)
            return self._noted(passage, verdict), True
        except StoreError as error:
            return self._without_store(passage, error), False

    async def _await_wait(self, passage: Passage) -> Answer | None:
        async with self.context.aio_link.waiting(passage.record[0]) as wake:
            while isinstance(verdict := passage.judge(await claimed(self.context, passage)), Wait):
                await woken(wake, verdict.seconds)
        return verdict

    async def _await_settle_quietly(
        self, passage: Passage, beats: beating, call: Call[bool], done: bool = False
    ) -> None:
        """Finishes, and renews the lease until it has, even when the caller is cancelled meanwhile."""
        link = self.context.aio_link
        ending = link.start(call, self.patience, self.attempt)
        try:
            held = await ending.answer
        except StoreError as error:
            self._unsaved(passage, error)
        except asyncio.CancelledError:
            beats.hand_over()
            link.spawn(self._await_settled(passage, beats, ending.outcome(), done))
            raise
        else:
            self._settled(passage, held, done)

    async def _await_settled(self, passage: Passage, beats: beating, ending: asyncio.Future[bool], done: bool) -> None:
        try:
            self._settled(passage, await ending, done)
        except StoreError as error:
            self._unsaved(passage, error)
        finally:
            beats.stop()

    # What both share.

    def _shared(self, seen: Seen, key: Key, fingerprint: bytes) -> Answer | None:
        """What all duplicates get, where that is known, sooner than anything else is made for the call."""
        known = seen.recall(record(self.context.namespace, self.guard.scope, key), fingerprint)
        if known is None or known.answer is None or self.guard.shadow:
            return None
        self.context.counters.add_each("once.remembered", _COUNTED[known.entry.state])
        return known.answer

    def _known(self, seen: Seen, passage: Passage) -> Answer | None:
        known = seen.recall(passage.record[0], passage.fingerprint)
        if known is None:
            return None
        self.context.counters.add_each("once.remembered", _COUNTED[known.entry.state])
        return passage.recognise(known)

    def _noted(self, passage: Passage, verdict: Answer | None) -> Answer | None:
        entry = passage.entry
        if entry.state == "started":
            self.context.counters.add("once.started")
            if entry.taken_over:
                self.context.counters.add("once.taken_over")
                log.warning(
                    "once.taken_over",
                    extra={"key": text_of(passage.key), "token": entry.token, "attempt": entry.attempt},
                )
        else:
            self.context.counters.add(_COUNTED[entry.state])
            if entry.state == "done" and self.seen is not None and entry.left_ms > 0:
                self.seen.keep(passage.record[0], passage.fingerprint, entry, entry.left_ms)
        return verdict

    def _shadowed(self, passage: Passage) -> bool:
        """What would be dropped runs all the same; it is counted."""
        self.context.counters.add("once.shadowed")
        log.info("once.would_drop", extra={"key": text_of(passage.key), "state": passage.entry.state})
        return True

    def _running(self, passage: Passage) -> beating:
        """Renewals until the block is left; `current()` answers while the work runs."""
        entry = passage.entry
        recovered = self.context.codec.decode(entry.checkpoint) if entry.checkpoint else None
        save = functools.partial(self._note, passage)
        execution = Execution(passage.key, entry.token, entry.attempt, recovered, save)
        return beating(self.context, self.guard.lease, passage.renew, execution)

    def _note(self, passage: Passage, data: object) -> tuple[Context, Call[bool]]:
        note = self.context.codec.encode(data, "checkpoint")  # the guard's codec has a limit that is meant for results
        return self.context, passage.claims.checkpoint(passage.record, passage.owner, note)

    @contextmanager
    def _running_free(self, passage: Passage, guarded: bool) -> Generator[None]:
        """Without a lease: marked before it runs, in shadow, or not guarded by the store at all."""
        with executing(self._free(passage)), self._locally(passage, guarded):
            yield

    def _free(self, passage: Passage) -> Execution:
        entry = passage.entry
        save = functools.partial(self._note, passage) if self.guard.shadow else None
        if entry.state == "started":
            return Execution(passage.key, entry.token, entry.attempt, None, save)
        return Execution(passage.key, 0, 1, None, save)

    @contextmanager
    def _locally(self, passage: Passage, guarded: bool) -> Generator[None]:
        if guarded or self.guard.on_store_error != "local":
            yield
        else:
            with self.local.running(passage.record[0], self.guard.retention, self.guard.at_most_once):
                yield

    def _without_store(self, passage: Passage, error: StoreError) -> Answer | None:
        """What `on_store_error` says: raise, run unguarded, or run guarded by this process alone."""
        policy = self.guard.on_store_error
        if policy == "raise" or isinstance(error, UnexpectedData | DecodeError):
            raise error
        self.context.counters.add(f"once.store_error.{policy}")
        log.error("once.store_error", extra={"key": text_of(passage.key), "policy": policy, "error": str(error)})
        if policy == "run":
            return None
        state = self.local.enter(passage.record[0])
        if state == "started":
            return None
        passage.entry = Entry("done" if state == "done" else "in_progress")
        return self._local_answer(text_of(passage.key), state)

    def _local_answer(self, key: str, state: str) -> Answer:
        if state == "in_progress":
            skip = self.guard.on_in_progress == "skip"
            return Answer() if skip else Answer(error=AlreadyInProgress(key, self.guard.lease / 1000))
        if self.guard.on_done == "skip":
            return Answer()
        why = "it ran here while the store was away"
        return Answer(error=AlreadyDone(key) if self.guard.on_done == "raise" else ResultUnavailable(key, why))

    def _settled(self, passage: Passage, held: bool, done: bool) -> None:
        if not held:
            self.context.counters.add("once.lease_lost")
            log.warning("once.lease_lost", extra={"key": text_of(passage.key)})
        elif done:
            self.context.counters.add("once.completed")
            if passage.result[0] == b"n":
                self.context.counters.add("once.unstored")
                log.warning("once.unstored", extra={"key": text_of(passage.key)})
            if self.seen is not None:
                self.seen.keep(passage.record[0], passage.fingerprint, passage.finished(), self.guard.retention)

    def _unsaved(self, passage: Passage, error: StoreError) -> None:
        name = "once.not_durable" if isinstance(error, NotDurable) else "once.unsaved"
        self.context.counters.add(name)
        log.error(name, extra={"key": text_of(passage.key), "error": str(error)})


_COUNTED = {state: f"once.{state}" for state in get_args(State)}
"""Under which name each answer of a claim is counted."""


def _asynchronous(retry: tenacity.BaseRetrying) -> tenacity.AsyncRetrying:
    """The same policy for a coroutine function; strategies are shared, the loop is tenacity's own."""
    import tenacity

    if isinstance(retry, tenacity.AsyncRetrying):
        return retry.copy()
    facts = {name: getattr(retry, name) for name in _STRATEGIES}
    return tenacity.AsyncRetrying(**facts)


_STRATEGIES = (
    "stop",
    "wait",
    "retry",
    "before",
    "after",
    "before_sleep",
    "reraise",
    "retry_error_cls",
    "retry_error_callback",
)
