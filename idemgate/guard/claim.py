"""A claim of a key as an object, blocking and async. The decorator uses the same calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from idemgate.core.calls import Call
from idemgate.core.clock import monotonic
from idemgate.core.codec import digest
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, text_of
from idemgate.core.text import last_line, one_line
from idemgate.core.validation import check_iterable
from idemgate.core.verdict import counts_no_attempt
from idemgate.core.waits import wait_for_wakeup
from idemgate.errors import (
    ClaimRejected,
    IdemgateError,
    InvalidArgument,
    LeaseLost,
    NotDurable,
    ResultUnavailable,
    StoreError,
)
from idemgate.guard.call import (
    decode_failure,
    is_late,
    pause,
    rejection_error,
    renew,
    renew_async,
    send_claim,
    send_claim_async,
)
from idemgate.guard.claim_calls import ClaimReply, Claims, Completion, Renewal
from idemgate.guard.current import Execution, own_wait_error
from idemgate.guard.heartbeat import EndTimeouts, Heartbeat, end_timeouts, note_run, register_scope
from idemgate.guard.options import ClaimOptions, OnceOptions, claim_options
from idemgate.guard.request import FAILURE, INFINITE, NOT_STORED, VALUE, Grant, Request, log_facts
from idemgate.store.context import Context

__all__ = [
    "AioClaim", "BaseClaim", "Claim", "claim_request", "claim_requests", "record_block_end", "renew_until_ended",
]  # fmt: skip

log: logging.Logger = logging.getLogger("idemgate.once")

ClaimState = Literal["started", "in_progress", "done"]


class BaseClaim:
    """The common part of `Claim` and `AioClaim`.

    Attributes:
        state: "started" (this owner may run), "in_progress" (another owner runs) or "done".
        retry_after: seconds until the other owner's lease ends, unless it is renewed.
        token: the fencing token.
        attempt: the number of this attempt; 1 is the first.
        taken_over: how many former owners lost their lease.
        recovered: the checkpoint of a former attempt, or None.
        error: a claim of `claim_many` that has no state has this error instead, and raises it on use. It is KeyReused,
            OutcomeUnknown, AttemptsExhausted, LeaseLost, UnexpectedData, or DecodeError for a corrupt checkpoint.
    """

    __slots__ = (
        "__weakref__", "_answer", "_blocks", "_cancelled", "_context", "_end_recorded", "_end_requested", "_ending",
        "_error", "_execution", "_extended_until", "_leased_at", "_request",
    )  # fmt: skip

    def __init__(self, context: Context, request: Request) -> None:
        self._context = context
        self._request = request
        self._answer: ClaimReply | None = None
        self._leased_at = INFINITE  # the lease counts from this time of the process
        self._extended_until = 0.0  # the end of the lease that was asked for last
        self._error: IdemgateError | None = None
        self._end_requested = False  # an end was requested
        self._end_recorded = False  # and its reply was recorded
        self._ending = "completed"
        self._execution: Execution | None = None
        self._cancelled = False
        self._blocks: list[Heartbeat | None] = []  # the heartbeats of the blocks it is in

    def __repr__(self) -> str:
        reply = self._answer
        answer = f"{reply.state} token={reply.token}" if reply else repr(self._error) if self._error else "not sent"
        return f"<{type(self).__name__} {text_of(self._request.key)!r} {answer}>"

    def _begin_send(self) -> Request:
        """Return the request to send. A late copy of an earlier one may have started the lease."""
        self._leased_at = min(self._leased_at, monotonic())
        return self._request

    def _give_up(self) -> None:
        """Make the next claim that of another owner: the release of this one could follow it, and free the key."""
        self._request, self._leased_at = self._request.with_new_owner(), INFINITE

    def _build_grant(self, reply: ClaimReply) -> Grant:
        return Grant(self._request, reply, self._leased_at, "lease")

    def _set_reply(self, reply: ClaimReply) -> None:
        """Store the reply to the claim. Raise its error if the claim was rejected."""
        if (error := rejection_error(reply, self._request.key, self._request.options.scope)) is not None:
            if reply.state == "held":
                self._context.activity.note_held(self._request.options.scope, text_of(self._request.key))
            raise error
        self._answer = reply
        if reply.state == "started" and self._request.options.history:
            self._note("started")
        if reply.state == "started" and reply.taken_over:
            self._note("taken_over")
        if self._blocks and reply.state == "started":
            # `wait` granted it inside its block. Another task may have awaited it, so `current()` stays as it is.
            self._blocks[-1] = self._start_heartbeat(reply, with_current=False)

    def _note(self, what: str, error: str = "") -> None:
        """Note what happened to the key of a claim that was granted."""
        note_run(self._context, self._request, self._reply, what, error)

    def _apply_reply(self, outcome: ClaimReply | StoreError, leased_at: float) -> None:
        """Store one reply of a batch. Keep its error for the caller that uses this claim."""
        self._leased_at = leased_at
        try:
            if isinstance(outcome, StoreError):
                raise outcome
            self._set_reply(outcome)
            if outcome.checkpoint:
                self.recovered  # noqa: B018 - a corrupt checkpoint must be found now, not inside a block
        except (ClaimRejected, StoreError) as error:
            self._error = error

    @property
    def _reply(self) -> ClaimReply:
        """The reply to the claim. Raise its error, or InvalidArgument if it was not awaited yet."""
        if self._error is not None:
            raise self._error
        if self._answer is None:
            raise InvalidArgument(
                "claim",
                self._request.key,
                "the claim was not awaited",
                "Write `claim = await gate.aio.claim(...)` or `async with`",
            )
        return self._answer

    @property
    def state(self) -> ClaimState:
        """The state of the claim: "started", "in_progress" or "done"."""
        return self._reply.state  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    @property
    def started(self) -> bool:
        """True if this owner may run."""
        return self._reply.state == "started"

    @property
    def error(self) -> IdemgateError | None:
        """The error of a rejected claim of `claim_many`, else None."""
        return self._error

    @property
    def lease_lost(self) -> bool:
        """True if a heartbeat inside a `with` block found the lease lost: stop the work."""
        return self._execution is not None and self._execution.lease_lost

    @property
    def cancel_requested(self) -> bool:
        """True once `gate.cancel` was called for this key, and `extend` or a heartbeat of a block learned it: stop."""
        return self._cancelled or (self._execution is not None and self._execution.cancel_requested)

    @property
    def _is_held(self) -> bool:
        """True if this owner may run and has not ended its claim."""
        return self._error is None and not self._end_requested and self._reply.state == "started"

    @property
    def token(self) -> int:
        """The fencing token. A later owner of the key has a higher one."""
        return self._reply.token

    @property
    def attempt(self) -> int:
        """The number of this attempt; 1 is the first."""
        return self._reply.attempt

    @property
    def taken_over(self) -> int:
        """The number of former owners that lost their lease."""
        return self._reply.taken_over

    @property
    def retry_after(self) -> float | None:
        """The seconds until the other owner's lease ends unless renewed. None unless in progress."""
        return self._reply.left_ms / 1000 if self._reply.state == "in_progress" else None

    @property
    def result(self) -> Any:
        """The stored result of a done key, or None while the key is not done.

        A model is the dict of its fields. A stored failure (`on_error="store"`) is a dict of
        "failed", its type, and "text". Raise ResultUnavailable if the key is done without a result.
        """
        reply, options = self._reply, self._request.options
        if reply.state != "done":
            return None
        if reply.kind == NOT_STORED:
            why = reply.result.decode(errors="replace") or "nothing was stored"
            raise ResultUnavailable(text_of(self._request.key), why, options.scope)
        if reply.kind == FAILURE:
            kind, text = decode_failure(reply)
            return {"failed": kind, "text": text}
        return options.codec.decode(reply.result)

    @property
    def recovered(self) -> Any:
        """The checkpoint of a former attempt, or None."""
        packed = self._reply.checkpoint
        return self._request.options.codec.decode(packed) if packed else None

    def _mark_ended(self) -> None:
        """Note that an end was requested: a renewal that fails from now on is no loss."""
        self._end_requested = True
        if self._execution is not None:
            self._execution.end()

    def _end_with(self, call: Call[bool]) -> Call[bool]:
        """Mark the claim as ended and return the call that ends it."""
        self._mark_ended()
        return call

    def _record_end(self, held: bool) -> bool:
        """Return the reply to an end. Count a lost claim once."""
        if not self._end_recorded and self._error is None and self._reply.state == "started":
            self._end_recorded = True
            if not held:
                self._context.counters.add("once.lost")
                facts = log_facts(self._request)
                log.warning("once.lost scope=%r key=%r", *facts.values(), extra=facts)
                self._note("lost")
            elif self._request.options.history:
                self._note(self._ending)
        return held

    def _completion(self, result: object, retention: Duration | None) -> Completion:
        """Return the record, owner, token, retention (ms) and encoded result of a completion."""
        request, options = self._request, self._request.options
        data = options.codec.encode(result, "result")
        if retention is None:
            return request.record[0], request.owner, self._reply.token, options.retention, data
        retention_ms = milliseconds(retention, "retention")
        register_scope(self._context, options.scope, retention_ms)  # `gate.resolve` keeps a key as long as the longest
        return request.record[0], request.owner, self._reply.token, retention_ms, data

    def _build_completion(self, result: object, retention: Duration | None) -> Call[bool]:
        record, owner, fence, retention_ms, data = self._completion(result, retention)
        stored = self._reply.stored
        return self._request.claims.complete((record,), owner, fence, retention_ms, VALUE, data, stored)

    def _build_release(self, error: BaseException | None = None) -> Call[bool]:
        """Build the call that releases the claim, after an error of its block if there is one."""
        self._ending = "released"
        request, undo = self._request, counts_no_attempt(error)
        return request.claims.release(request.record, request.owner, request.options.retention, undo)

    def _build_checkpoint(self, data: object) -> Call[bool]:
        request = self._request
        return request.claims.checkpoint(request.record, request.owner, self._context.codec.encode(data, "checkpoint"))

    def _build_extension(self, lease: Duration | None) -> Call[Renewal]:
        """Build the call that renews the lease. The heartbeats of its blocks do not shorten it."""
        request = self._request
        length = request.options.lease if lease is None else milliseconds(lease, "lease")
        self._extended_until = monotonic() + length / 1000
        for heartbeat in self._blocks:
            if heartbeat is not None:
                heartbeat.extend(self._extended_until)
        return request.claims.renew(request.record, request.owner, length, request.options.retention)

    def _record_extension(self, renewal: Renewal, asked: float) -> bool:
        """Record the reply to a renewal that was sent at `asked`. Return False if the claim was lost."""
        if renewal != "lost":
            self._leased_at = asked
        self._cancelled = self._cancelled or renewal == "cancelled"
        return renewal != "lost"

    def _check_other_owner(self) -> None:
        """Raise AlreadyInProgress if the caller is part of the run that owns the key, so that a wait could not end."""
        if (error := own_wait_error(self._context, self._request, self._reply.left_ms)) is not None:
            raise error

    def _enter_block(self, with_current: bool = True) -> None:
        """Start a heartbeat if the claim is held."""
        reply = self._reply
        self._blocks.append(self._start_heartbeat(reply, with_current) if reply.state == "started" else None)

    def _start_heartbeat(self, reply: ClaimReply, with_current: bool) -> Heartbeat:
        """Start the renewals of this claim. With `with_current`, `current()` returns its execution."""
        grant = self._build_grant(reply)
        if self._execution is None:
            recovered = self.recovered if reply.checkpoint else None
            self._execution = Execution(self._context, grant, reply.token, reply.attempt, recovered)
        if with_current:
            self._execution.end_with(self)
        heartbeat = Heartbeat(self._context, grant, self._execution, with_current)
        if self._extended_until:
            heartbeat.extend(self._extended_until)
        return heartbeat.__enter__()

    def _leave_block(self) -> None:
        """Stop the heartbeat of the innermost block."""
        if (heartbeat := self._blocks.pop()) is not None:
            heartbeat.__exit__()

    def _end_timeouts(self, completes: bool) -> EndTimeouts:
        """Return the timeouts of an end. A completion in a block may take as long as the lease, which is renewed."""
        return end_timeouts(self._context, self._request.options.lease, renewed=completes and self._is_renewed)

    @property
    def _is_renewed(self) -> bool:
        """True in a block, whose heartbeat renews the lease."""
        return any(self._blocks)

    def _hand_over_heartbeats(self) -> list[Heartbeat]:
        """Let the heartbeats outlive their blocks, and return them. Each must be stopped."""
        running = [heartbeat for heartbeat in self._blocks if heartbeat is not None]
        for heartbeat in running:
            heartbeat.hand_over()
        return running

    def _must_hold(self, error: BaseException) -> bool:
        """Return True if this error of the body is an interruption that leaves the key to `gate.resolve`."""
        return self._request.options.holds_interrupted and not isinstance(error, Exception)

    def _build_block_end(self, error: BaseException | None) -> Call[bool] | None:
        """Build the call that ends the claim of a block, or None if its body has ended it or the key must be held."""
        if not self._is_held or (error is not None and self._must_hold(error)):
            return None
        if isinstance(error, Exception):
            self._note("failed", last_line(error))
        return self._end_with(self._build_completion(None, None) if error is None else self._build_release(error))


class Claim(BaseClaim):
    """A claim of a key by one owner, blocking. Make it with `gate.claim`.

    In a `with` block a heartbeat renews the lease while the body runs. Leaving the block completes the claim with the
    result None, or releases it if the body raised. A claim that the body has ended stays as it is. Outside a block only
    `extend` renews the lease. The body also runs when the claim is not `started`: check it.
    """

    def acquire(self) -> Self:
        """Send the claim unless it was sent; `gate.claim` does this. One round trip."""
        if self._answer is None and self._error is None:
            self._send()
        return self

    def _send(self) -> None:
        """Send the claim. Raise LeaseLost if its lease has ended before the reply arrived, and was taken over."""
        request = self._begin_send()
        try:
            reply = send_claim(self._context, request)
            if reply.state == "started" and is_late(request, self._leased_at):
                self._leased_at = renew(self._context, self._build_grant(reply)).leased_at
        except (NotDurable, LeaseLost):
            self._give_up()
            raise
        self._set_reply(reply)

    def __enter__(self) -> Self:
        self._enter_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome: bool | StoreError
        try:
            if (call := self._build_block_end(error)) is None:
                return
            outcome = self._context.link.run(call, *self._end_timeouts(error is None))
        except StoreError as failed:
            outcome = failed
        finally:
            self._leave_block()
        record_block_end(self._context, [self], [outcome], error)

    def complete(self, result: object = None, *, retention: Duration | None = None) -> bool:
        """Mark the key done with this result. Atomic, one round trip.

        Args:
            result: what duplicates get.
            retention: how long the key stays done. None: the retention of the claim.

        Returns:
            False if the claim was lost; nothing was written.

        Raises:
            InvalidArgument: the result cannot be stored. The claim is still held.
            StoreError: the store did not answer.
        """
        call = self._end_with(self._build_completion(result, retention))
        return self._record_end(self._context.link.run(call, *self._end_timeouts(completes=True)))

    def release(self) -> bool:
        """Release the claim, so that the next caller may run. One round trip.

        Returns:
            False if the claim was lost.

        Raises:
            StoreError: the store did not answer.
        """
        return self._record_end(
            self._context.link.run(self._end_with(self._build_release()), *self._end_timeouts(completes=False))
        )

    def extend(self, lease: Duration | None = None) -> bool:
        """Renew the lease from now on. One round trip.

        Args:
            lease: the new length. None: the lease of the claim. The heartbeat of a block does not shorten it.

        Returns:
            False if the claim was lost.

        Raises:
            StoreError: the store did not answer.
        """
        asked = monotonic()
        return self._record_extension(self._context.link.run(self._build_extension(lease)), asked)

    def checkpoint(self, data: object) -> bool:
        """Store data for the next attempt, in case this one does not finish. One round trip.

        Returns:
            False if the claim was lost; nothing was written.

        Raises:
            InvalidArgument: the data cannot be stored.
            StoreError: the store did not answer.
        """
        return self._context.link.run(self._build_checkpoint(data))

    def wait(self, timeout: Duration) -> ClaimState:
        """Wait until the claim of another owner ends, then claim again.

        In a `with` block the heartbeat starts with "started". `current()` knows only claims that were granted before
        their block.

        Args:
            timeout: how long to wait.

        Returns:
            "done" (see `result`), "started" (the other owner failed or lost its lease, and this one may run), or
            "in_progress" after `timeout`.

        Raises:
            AlreadyInProgress: the caller is part of the run, or of the block, that owns the key. A claim outside of a
                block may be ended by other code, so waiting for it is allowed.
            StoreError: the store did not answer.
        """
        end = monotonic() + milliseconds(timeout, "timeout", zero=True) / 1000
        if self.state != "in_progress":
            return self.state
        self._check_other_owner()
        with self._context.link.waiting(self._request.record[0]) as waiter:
            while True:
                self._send()
                seconds = pause(self._reply, end)
                if self.state != "in_progress" or seconds <= 0:
                    return self.state
                waiter.wait(seconds)


class AioClaim(BaseClaim):
    """The async form of `Claim`.

    Use `claim = await gate.aio.claim(...)` or `async with gate.aio.claim(...) as claim`.
    """

    def __await__(self) -> Generator[Any, None, Self]:
        return self._acquire().__await__()

    async def _acquire(self) -> Self:
        """Send the claim unless it was sent."""
        if self._answer is None and self._error is None:
            await self._send()
        return self

    async def _send(self) -> None:
        """Send the claim; see `Claim._send`."""
        request = self._begin_send()
        try:
            reply = await send_claim_async(self._context, request)
            if reply.state == "started" and is_late(request, self._leased_at):
                self._leased_at = (await renew_async(self._context, self._build_grant(reply))).leased_at
        except (NotDurable, LeaseLost, asyncio.CancelledError):
            self._give_up()
            raise
        self._set_reply(reply)

    async def __aenter__(self) -> Self:
        await self._acquire()
        self._enter_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome: bool | StoreError
        try:
            if (call := self._build_block_end(error)) is None:
                return
            outcome = await self._run_end(call, completes=error is None)
        except StoreError as failed:
            outcome = failed
        finally:
            self._leave_block()
        record_block_end(self._context, [self], [outcome], error)

    async def _run_end(self, call: Call[bool], completes: bool) -> bool:
        """Send an end and return its reply. If the caller is cancelled, renew the lease until the reply."""
        link = self._context.aio_link
        pending = link.start(call, *self._end_timeouts(completes))
        try:
            return await pending.answer
        except asyncio.CancelledError:
            link.spawn(renew_until_ended(self._context, self._hand_over_heartbeats(), [self], pending.outcome()))
            raise

    async def complete(self, result: object = None, *, retention: Duration | None = None) -> bool:
        """Mark the key done with this result; see `Claim.complete`."""
        call = self._end_with(self._build_completion(result, retention))
        return self._record_end(await self._run_end(call, completes=True))

    async def release(self) -> bool:
        """Release the claim; see `Claim.release`."""
        return self._record_end(await self._run_end(self._end_with(self._build_release()), completes=False))

    async def extend(self, lease: Duration | None = None) -> bool:
        """Renew the lease; see `Claim.extend`."""
        asked = monotonic()
        return self._record_extension(await self._context.aio_link.run(self._build_extension(lease)), asked)

    async def checkpoint(self, data: object) -> bool:
        """Store data for the next attempt; see `Claim.checkpoint`."""
        return await self._context.aio_link.run(self._build_checkpoint(data))

    async def wait(self, timeout: Duration) -> ClaimState:  # noqa: ASYNC109 - a timeout returns a state and does not raise
        """Wait until the claim of another owner ends, then claim again; see `Claim.wait`."""
        end = monotonic() + milliseconds(timeout, "timeout", zero=True) / 1000
        if self.state != "in_progress":
            return self.state
        self._check_other_owner()
        async with self._context.aio_link.waiting(self._request.record[0]) as wake:
            while True:
                await self._send()
                seconds = pause(self._reply, end)
                if self.state != "in_progress" or seconds <= 0:
                    return self.state
                await wait_for_wakeup(wake, seconds)


def record_block_end(
    context: Context, claims: Sequence[BaseClaim], outcomes: Sequence[bool | StoreError], error: BaseException | None
) -> None:
    """Record the replies to the claims that a block ended, and count the lost ones.

    If the store failed, raise its error, unless the body raised or was cancelled. The caller needs that error instead.
    The unreleased claims are then counted, and their leases expire.
    """
    failed = [
        (claim, outcome) for claim, outcome in zip(claims, outcomes, strict=True) if isinstance(outcome, StoreError)
    ]
    for claim, outcome in zip(claims, outcomes, strict=True):
        if not isinstance(outcome, StoreError):
            claim._record_end(outcome)
    if failed and error is None:
        raise failed[0][1]
    if failed:
        context.counters.add("once.unreleased", len(failed))
        keys = [text_of(claim._request.key) for claim, _ in failed]
        error = failed[0][1]
        log.error("once.unreleased keys=%r: %s", keys, one_line(error), extra={"keys": keys, "error": str(error)})


async def renew_until_ended(
    context: Context,
    running: Sequence[Heartbeat],
    claims: Sequence[BaseClaim],
    pending: Awaitable[bool | list[bool | StoreError]],
) -> None:
    """Renew the claims of a cancelled caller until the store answers their end.

    Stop the heartbeats then, and record the replies.
    """
    outcomes: list[bool | StoreError]
    try:
        found = await pending
        outcomes = found if isinstance(found, list) else [found]
    except StoreError as error:
        outcomes = [error for _ in claims]
    finally:
        for heartbeat in running:
            heartbeat.stop()
    record_block_end(context, claims, outcomes, asyncio.CancelledError())


def _register(context: Context, options: OnceOptions) -> None:
    if context.registered_scopes.get(options.scope, -1) < options.retention:
        register_scope(context, options.scope, options.retention)


def claim_request(context: Context, key: Key, fingerprint: object, options: ClaimOptions) -> Request:
    """Build the request of a claim. Raise InvalidArgument."""
    checked_options = claim_options(context.codec, options)
    _register(context, checked_options)
    packed = b"" if fingerprint is None else digest(fingerprint, name="fingerprint")
    return Request(checked_options, Claims(context.namespace, context.clock), key, packed)


def claim_requests(
    context: Context, keys: Iterable[Key], fingerprints: Iterable[object] | None, options: ClaimOptions
) -> list[Request]:
    """Build the requests of many claims. Raise InvalidArgument, which names the index of a bad key or fingerprint."""
    checked_options, claims = claim_options(context.codec, options), Claims(context.namespace, context.clock)
    _register(context, checked_options)
    given = [*check_iterable(keys, "keys", "Pass a list of keys")]
    prints = _digest_each(fingerprints, len(given))
    requests: list[Request] = []
    for key, fingerprint in zip(given, prints, strict=True):
        try:
            requests.append(Request(checked_options, claims, key, fingerprint))
        except InvalidArgument as error:
            raise InvalidArgument(f"keys[{len(requests)}]", error.value, error.problem, error.fix) from None
    return requests


def _digest_each(fingerprints: Iterable[object] | None, n: int) -> list[bytes]:
    if fingerprints is None:
        return [b""] * n
    each = list(check_iterable(fingerprints, "fingerprints", _FINGERPRINTS))
    if len(each) != n:
        raise InvalidArgument("fingerprints", each, f"{len(each)} of them for {n} keys", _FINGERPRINTS)
    return [b"" if value is None else digest(value, name=f"fingerprints[{index}]") for index, value in enumerate(each)]


_FINGERPRINTS = "Pass a list with one value for each key, or None"
