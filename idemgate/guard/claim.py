"""A claim as an object: asked once, answered at once. The primitive that the decorator is made of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Generator, Sequence
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from idemgate.core.calls import Call
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import text_of
from idemgate.errors import ClaimRejected, IdemgateError, InvalidArgument, ResultUnavailable, StoreError
from idemgate.guard.acquire import asked, claimed
from idemgate.guard.attempt import Passage, failure_of, refusal
from idemgate.guard.calls import Ending, Entry
from idemgate.guard.current import Execution
from idemgate.guard.heartbeat import attempt_seconds, beating, woken
from idemgate.store.context import Context

__all__ = ["AioClaim", "Claim", "Claimed", "block_ended", "outlast"]

log = logging.getLogger("idemgate.once")

State = Literal["started", "in_progress", "done"]


class Claimed:
    """What both flavours know of a claim.

    `state` is "started" (this owner may run), "in_progress" (another runs; `retry_after` seconds are left of its
    lease) or "done".
    `token` is the fencing token, `attempt` 1 for the first, `taken_over` how many former owners fell silent,
    `recovered` what one of
    them left with `checkpoint`.
    `error`: why there is no state (KeyReused, OutcomeUnknown, AttemptsExhausted, UnexpectedData, or DecodeError for what
    a former one left), of a claim of `claim_many`, which raises it when anything else of it is asked for; else None.
    """

    __slots__ = ("_blocks", "_context", "_ended", "_entry", "_error", "_execution", "_over", "_passage")

    def __init__(self, context: Context, passage: Passage) -> None:
        self._context = context
        self._passage = passage
        self._entry: Entry | None = None
        self._error: IdemgateError | None = None
        self._ended = False  # an ending was asked for
        self._over = False  # and answered
        self._execution: Execution | None = None
        self._blocks: list[beating | None] = []  # which it is inside of, with what keeps it alive there

    def __repr__(self) -> str:
        entry = self._entry
        answer = f"{entry.state} token={entry.token}" if entry else repr(self._error) if self._error else "not asked"
        return f"<{type(self).__name__} {text_of(self._passage.key)!r} {answer}>"

    def _take(self, entry: Entry) -> None:
        if (error := refusal(entry, self._passage.key, self._passage.guard.scope)) is not None:
            raise error
        self._entry = entry
        self._passage.entry = entry
        if self._blocks and entry.state == "started":
            # Granted inside of its block, by `wait`, which another task may have awaited: `current()` stays as it is.
            self._blocks[-1] = self._kept_alive(inside=False)

    def _hear(self, outcome: Entry | StoreError) -> None:
        """As `_take`, of many: what is wrong with one is for who asks that one."""
        try:
            if isinstance(outcome, StoreError):
                raise outcome
            self._take(outcome)
            self.recovered  # noqa: B018 - what cannot be read back is found out now, and not inside of a block
        except (ClaimRejected, StoreError) as error:
            self._error = error

    @property
    def _answer(self) -> Entry:
        if self._error is not None:
            raise self._error
        if self._entry is None:
            raise InvalidArgument(
                "claim",
                self._passage.key,
                "it was not asked yet",
                "Write `claim = await gate.aio.claim(...)` or `async with`",
            )
        return self._entry

    @property
    def state(self) -> State:
        return self._answer.state  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    @property
    def started(self) -> bool:
        return self._answer.state == "started"

    @property
    def error(self) -> IdemgateError | None:
        return self._error

    @property
    def lease_lost(self) -> bool:
        """True when its heartbeats, inside of a `with` block, were told that the right to run is gone: stop."""
        return self._execution is not None and self._execution.lease_lost

    @property
    def _held(self) -> bool:
        """This owner may run, and has not ended it."""
        return self._error is None and self.started and not self._ended

    @property
    def token(self) -> int:
        return self._answer.token

    @property
    def attempt(self) -> int:
        return self._answer.attempt

    @property
    def taken_over(self) -> int:
        return self._answer.taken_over

    @property
    def retry_after(self) -> float | None:
        """Seconds until the other owner's lease ends unless it is renewed; None unless in progress."""
        return self._answer.left_ms / 1000 if self._answer.state == "in_progress" else None

    @property
    def result(self) -> Any:
        """The stored result of a done key; None while there is none. ResultUnavailable if it is done without a value.

        A failure that was stored (`on_error="store"`) is a dict {"failed": kind, "text": text}.
        """
        entry = self._answer
        if entry.state != "done":
            return None
        if entry.kind == b"n":
            raise ResultUnavailable(
                text_of(self._passage.key), entry.result.decode(errors="replace") or "nothing was stored"
            )
        if entry.kind == b"e":
            kind, text = failure_of(entry)
            return {"failed": kind, "text": text}
        return self._passage.guard.codec.decode(entry.result)

    @property
    def recovered(self) -> Any:
        """What a former attempt kept with `checkpoint`; None if nothing."""
        note = self._answer.checkpoint
        return self._passage.guard.codec.decode(note) if note else None

    def _end(self) -> None:
        self._ended = True
        if self._execution is not None:
            self._execution.end()

    def _ending(self, call: Call[bool]) -> Call[bool]:
        self._end()
        return call

    def _was_held(self, held: bool) -> bool:
        """The answer to an ending. That a claim was lost is counted with the first."""
        if not self._over and self._error is None and self.started:
            self._over = True
            if not held:
                self._context.counters.add("once.lease_lost")
                log.warning("once.lease_lost", extra={"key": text_of(self._passage.key)})
        return held

    def _completion(self, result: object, retention: Duration | None) -> Ending:
        passage = self._passage
        kept = passage.guard.retention if retention is None else milliseconds(retention, "retention")
        data = passage.guard.codec.encode(result, "result")
        return passage.record[0], passage.owner, self.token, kept, data

    def _completing(self, result: object, retention: Duration | None) -> Call[bool]:
        record, owner, fence, kept, data = self._completion(result, retention)
        return self._passage.claims.complete((record,), owner, fence, kept, b"v", data)

    def _extending(self, lease: Duration | None) -> Call[bool]:
        passage = self._passage
        length = passage.guard.lease if lease is None else milliseconds(lease, "lease")
        return passage.claims.renew(passage.record, passage.owner, length, passage.guard.retention)

    def _enter_block(self, inside: bool = True) -> None:
        self._blocks.append(self._kept_alive(inside) if self.started else None)

    def _kept_alive(self, inside: bool) -> beating:
        passage = self._passage
        if self._execution is None:
            save = partial(
                _noting, self._context, passage
            )  # which does not know the claim: no cycle, which costs a batch
            self._execution = Execution(passage.key, self.token, self.attempt, self.recovered, save)
        beats = beating(self._context, passage.guard.lease, passage.renew, self._execution, inside)
        beats.__enter__()
        return beats

    def _leave_block(self) -> None:
        if (beats := self._blocks.pop()) is not None:
            beats.__exit__()

    @property
    def _attempt(self) -> float | None:
        """Seconds that one try of a completion may wait for its reply."""
        return attempt_seconds(self._passage.guard.lease)

    def _hand_over(self) -> list[beating]:
        """The renewals of its blocks, which go on when these are left, until each is stopped."""
        running = [beats for beats in self._blocks if beats is not None]
        for beats in running:
            beats.hand_over()
        return running

    def _exit_call(self, error: BaseException | None) -> Call[bool] | None:
        """How a `with` block ends a claim that its body has not ended itself."""
        if not self._held:
            return None
        return self._ending(self._completing(None, None) if error is None else self._passage.release())


def _noting(context: Context, passage: Passage, data: object) -> tuple[Context, Call[bool]]:
    note = passage.guard.codec.encode(data, "checkpoint")
    return context, passage.claims.checkpoint(passage.record, passage.owner, note)


def block_ended(
    context: Context, claims: Sequence[Claimed], outcomes: Sequence[bool | StoreError], error: BaseException | None
) -> None:
    """Counts what a block, which was left by `error` or None, no longer held of these claims when it ended them.

    A claim that the store could not be asked to end: its error is raised, unless the body raised or was cancelled,
    which is what the caller has to get to know; then it is counted, and its lease runs out."""
    failed = [(claim, one) for claim, one in zip(claims, outcomes, strict=True) if isinstance(one, StoreError)]
    for claim, one in zip(claims, outcomes, strict=True):
        if not isinstance(one, StoreError):
            claim._was_held(one)
    if failed and error is None:
        raise failed[0][1]
    if failed:
        context.counters.add("once.unreleased", len(failed))
        keys = [text_of(claim._passage.key) for claim, _ in failed]
        log.error("once.unreleased", extra={"keys": keys, "error": str(failed[0][1])})


async def outlast(
    context: Context,
    running: Sequence[beating],
    claims: Sequence[Claimed],
    ending: Awaitable[bool | list[bool | StoreError]],
) -> None:
    """Renew the claims whose caller was cancelled until the store has answered their ending; then count the answer."""
    outcomes: list[bool | StoreError]
    try:
        found = await ending
        outcomes = found if isinstance(found, list) else [found]
    except StoreError as error:
        outcomes = [error for _ in claims]
    finally:
        for beats in running:
            beats.stop()
    block_ended(context, claims, outcomes, asyncio.CancelledError())


class Claim(Claimed):
    """One owner's claim of a key, blocking; make it with `gate.claim`.

    In a `with` block heartbeats keep it while the body runs; leaving the block completes it (result None) unless the
    body did, or releases it if the body raised. Outside of one, nothing renews it but `extend`. The body also runs
    when the claim is not `started`: ask.
    """

    def ask(self) -> Self:
        """Asks, if nobody did yet; `gate.claim` does."""
        if self._entry is None and self._error is None:
            self._take(asked(self._context, self._passage))
        return self

    def __enter__(self) -> Self:
        self._enter_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome: bool | StoreError
        try:
            if (call := self._exit_call(error)) is None:
                return
            outcome = self._context.link.run(call, attempt=self._attempt)
        except StoreError as failed:
            outcome = failed
        finally:
            self._leave_block()
        block_ended(self._context, [self], [outcome], error)

    def complete(self, result: object = None, *, retention: Duration | None = None) -> bool:
        """Done, with this result, for `retention` (None: the claim's). False if the claim was lost: nothing was
        written.

        InvalidArgument if the result cannot be stored; the claim is then still held."""
        call = self._ending(self._completing(result, retention))
        return self._was_held(self._context.link.run(call, attempt=self._attempt))

    def release(self) -> bool:
        """Gives the right back: the next caller may run. False if the claim was lost."""
        return self._was_held(self._context.link.run(self._ending(self._passage.release()), attempt=self._attempt))

    def extend(self, lease: Duration | None = None) -> bool:
        """The lease runs anew from now, for `lease` (None: the claim's). False if the claim was lost."""
        return self._context.link.run(self._extending(lease))

    def checkpoint(self, data: object) -> bool:
        """Keeps a note for the next attempt, should this one not finish. False if the claim was lost."""
        return self._context.link.run(_noting(self._context, self._passage, data)[1])

    def wait(self, timeout: Duration) -> State:
        """Waits until another owner's claim ends, and asks again: "done" (see `result`), "started" (it failed or fell
        silent, and this owner may run now), or "in_progress" after `timeout`. Inside of a `with` block, heartbeats
        begin with "started"; `current()` knows only claims that were granted before their block."""
        end = monotonic() + milliseconds(timeout, "timeout", zero=True) / 1000
        if self.state != "in_progress":
            return self.state
        with self._context.link.waiting(self._passage.record[0]) as waiter:
            while True:
                self._take(asked(self._context, self._passage))
                left = end - monotonic()
                if self.state != "in_progress" or left <= 0:
                    return self.state
                waiter.wait(min(left, 1.0, max(self._answer.left_ms / 1000, 0.01)))


class AioClaim(Claimed):
    """As `Claim`, awaiting: `claim = await gate.aio.claim(...)`, or `async with gate.aio.claim(...) as claim`."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ask().__await__()

    async def _ask(self) -> Self:
        if self._entry is None and self._error is None:
            self._take(await claimed(self._context, self._passage))
        return self

    async def __aenter__(self) -> Self:
        await self._ask()
        self._enter_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome: bool | StoreError
        try:
            if (call := self._exit_call(error)) is None:
                return
            outcome = await self._ended_by(call)
        except StoreError as failed:
            outcome = failed
        finally:
            self._leave_block()
        block_ended(self._context, [self], [outcome], error)

    async def _ended_by(self, call: Call[bool]) -> bool:
        """The answer to an ending. Cancelled meanwhile: renewals go on until there is one."""
        link = self._context.aio_link
        ending = link.start(call, attempt=self._attempt)
        try:
            return await ending.answer
        except asyncio.CancelledError:
            link.spawn(outlast(self._context, self._hand_over(), [self], ending.outcome()))
            raise

    async def complete(self, result: object = None, *, retention: Duration | None = None) -> bool:
        """As `Claim.complete`."""
        return self._was_held(await self._ended_by(self._ending(self._completing(result, retention))))

    async def release(self) -> bool:
        """As `Claim.release`."""
        return self._was_held(await self._ended_by(self._ending(self._passage.release())))

    async def extend(self, lease: Duration | None = None) -> bool:
        """As `Claim.extend`."""
        return await self._context.aio_link.run(self._extending(lease))

    async def checkpoint(self, data: object) -> bool:
        """As `Claim.checkpoint`."""
        return await self._context.aio_link.run(_noting(self._context, self._passage, data)[1])

    async def wait(self, timeout: Duration) -> State:  # noqa: ASYNC109 - it answers, it does not raise
        """As `Claim.wait`."""
        end = monotonic() + milliseconds(timeout, "timeout", zero=True) / 1000
        if self.state != "in_progress":
            return self.state
        async with self._context.aio_link.waiting(self._passage.record[0]) as wake:
            while True:
                self._take(await claimed(self._context, self._passage))
                left = end - monotonic()
                if self.state != "in_progress" or left <= 0:
                    return self.state
                await woken(wake, min(left, 1.0, max(self._answer.left_ms / 1000, 0.01)))
