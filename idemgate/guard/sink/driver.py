"""The driver of a guard with a sink: each run is a transaction of the sink, which also stores its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from idemgate.core import keys
from idemgate.core.calls import Call
from idemgate.core.validation import call_async, call_blocking, is_async
from idemgate.core.verdict import Verdict
from idemgate.errors import AlreadyInProgress, InvalidArgument, KeyReused
from idemgate.guard.attempt import ClaimAttempt, DuplicateResult, OnError
from idemgate.guard.claims import ClaimReply
from idemgate.guard.driver import Driver
from idemgate.guard.judge import record_hook_failure
from idemgate.guard.sink.protocol import AioSink, Sink, SinkEntry, StoredKind, StoredResult

__all__ = ["SinkDriver"]

R = TypeVar("R")
_KINDS: dict[bytes, StoredKind] = {b"v": "value", b"n": "none", b"e": "failure"}
_CODES = {kind: code for code, kind in _KINDS.items()}


class SinkDriver(Driver):
    """The drivers of a guard whose options have a sink.

    The row of the sink decides whether the work runs. The record in the store keeps other owners waiting, and answers
    duplicates without the database.
    """

    def run(
        self, attempt: ClaimAttempt, wrapped: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Verdict[R]:
        """Run one guarded call and return its verdict. Raise InvalidArgument if the sink is async."""
        if is_async(self.options.sink.apply):  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
            raise InvalidArgument("sink", self.options.sink, "async, and the handler is not", "Use guard.aio")
        return super().run(attempt, wrapped, args, kwargs)

    def execute(
        self, attempt: ClaimAttempt, wrapped: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> R:
        """Claim the key and run the work in a transaction of the sink; see `Driver.execute`."""
        run = _SinkRun(self, attempt, wrapped)
        result: Any = super().execute(attempt, run.apply, args, kwargs)
        return cast(R, result if run.stored is None else self._answer_stored(attempt))

    async def execute_async(
        self,
        attempt: ClaimAttempt,
        wrapped: Callable[..., Awaitable[R]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        """Claim the key and run the work in a transaction of the sink; see `execute`."""
        run = _SinkRun(self, attempt, wrapped)
        result: Any = await super().execute_async(attempt, run.apply_async, args, kwargs)
        return cast(R, result if run.stored is None else self._answer_stored(attempt))

    def _answer_stored(self, attempt: ClaimAttempt) -> Any:
        """Answer a call as a duplicate, with the stored result."""
        attempt.ran = False
        attempt.entry = ClaimReply("done", attempt.entry.token, attempt.entry.attempt, self.options.retention)
        attempt.entry.kind, attempt.entry.result = attempt.result
        return self.answer(attempt, cast(DuplicateResult, attempt.interpret_reply(attempt.entry)))

    @contextmanager
    def hold_without_lease(self, attempt: ClaimAttempt, guarded: bool) -> Generator[bool]:
        """Run without the store. Yield False, because the sink stores the result."""
        with super().hold_without_lease(attempt, guarded):
            yield False

    def build_failure(self, attempt: ClaimAttempt, error: BaseException) -> Call[bool] | None:
        """Build the call that follows a failure. A run that did not start is no attempt."""
        if attempt.ran:
            return super().build_failure(attempt, error)
        if isinstance(error, AlreadyInProgress):
            self.context.counters.add("once.sink_busy")
        return attempt.build_release(undo=True)

    def decide_failure(self, attempt: ClaimAttempt, error: BaseException) -> OnError:
        """Apply `on_error`. A failure is not stored, because the transaction that would store it is rolled back."""
        if not attempt.ran:
            return "release"
        policy = super().decide_failure(attempt, error)
        if policy != "store":
            return policy
        refusal = InvalidArgument("on_error", policy, "a sink stores no failures", "Return 'release' or 'keep'")
        record_hook_failure(self.context, attempt, "on_error", refusal)
        return "release"

    def record_end(self, attempt: ClaimAttempt, held: bool, done: bool) -> None:
        """Record the reply to the end of a claim. A committed row decides, whether the lease was lost or not."""
        super().record_end(attempt, held, done)
        if done:
            attempt.lost = False


class _SinkRun:
    """The transactions of one call. A retry policy makes more than one.

    `stored` is the result of an earlier run, if the sink had one.
    """

    def __init__(self, driver: SinkDriver, attempt: ClaimAttempt, wrapped: Callable[..., Any]) -> None:
        self.driver = driver
        self.attempt = attempt
        self.wrapped = wrapped
        self.stored: StoredResult | None = None
        self._has_run = False

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Run the work in a transaction of the sink. Return its result, or None if `stored` has one."""
        result: Any = None

        def work() -> StoredResult:
            nonlocal result
            self._start()
            result = call_blocking(self.wrapped, args, kwargs)
            return self._encode(result)

        sink = cast(Sink, self.driver.options.sink)
        self._finish(sink.apply(self._build_entry(), work))
        return result

    async def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Run the work in a transaction of the sink; see `apply`."""
        result: Any = None

        async def work() -> StoredResult:
            nonlocal result
            self._start()
            result = await call_async(self.wrapped, args, kwargs)
            return self._encode(result)

        sink = cast(AioSink, self.driver.options.sink)
        self._finish(await sink.apply(self._build_entry(), work))
        return result

    def _build_entry(self) -> SinkEntry:
        attempt, options = self.attempt, self.driver.options
        attempt.ran = self._has_run
        scope, key = keys.row_name(self.driver.context.namespace, options.scope, attempt.key)
        token = attempt.entry.token if attempt.entry.state == "started" else 0
        return SinkEntry(scope, key, attempt.fingerprint, token, options.retention / 1000)

    def _start(self) -> None:
        """Record that the work starts. An earlier transaction of this call has left nothing."""
        self._has_run = self.attempt.ran = True
        self.attempt.result = b"", b""
        self.attempt.interruption = None

    def _encode(self, result: object) -> StoredResult:
        self.attempt.encode_result(result)
        kind, data = self.attempt.result
        return StoredResult(_KINDS[kind], data, self.attempt.fingerprint)

    def _finish(self, stored: StoredResult | None) -> None:
        """Apply the answer of the sink. Raise KeyReused if its row has another fingerprint.

        A sink that suppresses the error of the handler has stored nothing: RuntimeError says so.
        """
        if stored is None:
            if not self.attempt.result[0]:
                raise RuntimeError(
                    f"apply() of {self.driver.options.sink!r} returned None, but the handler did not return. "
                    "Let apply() raise what work() raises"
                )
            return
        if stored.fingerprint != self.attempt.fingerprint:
            raise KeyReused(keys.text_of(self.attempt.key), self.driver.options.scope)
        self.stored = stored
        self.attempt.result = _CODES[stored.kind], stored.data  # pyright: ignore[reportAttributeAccessIssue]
        self.driver.context.counters.add("once.sink_replayed")
