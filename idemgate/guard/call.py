"""One guarded call from top to bottom: claim the key, decide, run the work under a lease, end the claim.

`run` and `run_async` tell it. The steps follow in the order in which they take them, each blocking one before its async
form. Both return an account of the call: the decorator returns its value or raises its error, `gate.guard` judges it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast, get_args

from idemgate.core.backoff import to_async
from idemgate.core.calls import Call
from idemgate.core.clock import monotonic
from idemgate.core.codec import Codec, add_trace, read_trace
from idemgate.core.codec.packing import may_hold_model
from idemgate.core.codec.restoring import holds_stored, restore
from idemgate.core.codec.storable import describe_unstored, has_other_class, refuse_unfinished_inside
from idemgate.core.keys import Key, text_of
from idemgate.core.text import event_log, last_line, message_of, one_line
from idemgate.core.validation import ENDED, call_async, call_blocking, refuse_unfinished
from idemgate.core.verdict import Verdict, counts_no_attempt, failure_of, verdict_of
from idemgate.core.waits import is_cancelled, wait_for_wakeup
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    AttemptsExhausted,
    DecodeError,
    IdemgateError,
    InvalidArgument,
    KeyReused,
    LeaseLost,
    MissingKey,
    NotDurable,
    OutcomeUnknown,
    ReplayedFailure,
    ResultUnavailable,
    SharedFailure,
    StoreError,
    UnexpectedData,
)  # fmt: skip
from idemgate.guard.claim_calls import ClaimReply, Renewal, ReplyState
from idemgate.guard.context import CacheEntry, GuardContext
from idemgate.guard.current import Execution, is_inside, own_wait_error
from idemgate.guard.heartbeat import Heartbeat, NoHeartbeat, note_run
from idemgate.guard.judge import is_last, judge, judge_unguarded
from idemgate.guard.options import OnceOptions, OnError
from idemgate.guard.request import (
    COMPLETED,
    COMPLETES,
    FAILURE,
    KEEP,
    NOT_STORED,
    RELEASE,
    UNASKED,
    UNDO,
    VALUE,
    Account,
    Duplicate,
    End,
    Ending,
    Grant,
    Request,
    build_ending,
    build_renewal,
    build_undo,
    lease_lost_error,
    log_facts,
)  # fmt: skip
from idemgate.guard.sink.transaction import Transaction
from idemgate.store.context import Context, Tracer

if TYPE_CHECKING:
    from idemgate.store.aio import PendingCall

__all__ = [
    "COUNTER_NAMES", "add_run_trace", "answer_duplicate", "claim_in_process", "decode_failure", "end_kept",
    "end_without_store", "ending_of_failure", "ending_of_result", "is_late", "may_start", "pause", "record_claim",
    "record_end", "record_unended", "rejection_error", "renew", "renew_async", "replayed_trace", "run", "run_async",
    "run_without_key", "run_without_key_async", "runs_without_key", "send_claim", "send_claim_async", "start_lease",
    "unfinished_of",
]  # fmt: skip

log: logging.Logger = event_log("idemgate.once")


# -- the call ---------------------------------------------------------------------------------------------------------


def run(  # noqa: C901, PLR0912 - the whole story
    guard: GuardContext,
    request: Request,
    wrapped: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: bool = False,
) -> Account:
    """Run one guarded call and return its account. Cancellation, KeyboardInterrupt and SystemExit are raised."""
    if guard.context.tracer is not None and not traced:
        return _trace_run(guard.context.tracer, guard, request, wrapped, args, kwargs)
    answer: Grant | Duplicate | None = None
    transaction: Transaction | None = None
    end: End | None = None
    ran = False
    try:
        answer = claim(guard, request)
        if isinstance(answer, Grant) and is_late(request, answer.leased_at):
            answer = renew_or_run_without(guard, answer)
        if isinstance(answer, Duplicate):
            if not guard.options.shadow:
                return answer_duplicate(guard, request, answer)
            answer = grant_in_shadow(guard, request, answer)

        work = wrapped
        if guard.options.sink is not None:
            transaction = Transaction(guard.context, answer, wrapped, encode_ending)
            work = transaction.apply
        if guard.retry:
            work = functools.partial(guard.retry.copy(), work)
        ran = True
        with start_lease(guard.context, answer) as lease:
            try:
                result = work(*args, **kwargs)
                if result.__class__ not in ENDED:
                    refuse_unfinished(result)
            except BaseException as error:
                lease.end_work()
                ending = ending_of_failure(guard, answer, transaction, error)
                end = end_claim(guard, answer, ending)
                raise
            try:
                lease.end_work()
                ending = ending_of_result(guard, answer, transaction, result)
                end = end_claim(guard, answer, ending)
            except BaseException:  # of a signal handler: the work has run, so its completion must be sent all the same
                if end is None:
                    ending = ending_of_result(guard, answer, transaction, result)
                    end = end_claim(guard, answer, ending)
                raise
        if transaction is not None and transaction.stored is not None:
            return answer_stored(guard, answer, transaction.stored)
        if end is not COMPLETED:
            raise_after_end(answer, end)
        return result, None, answer, end, True  # noqa: TRY300 - what it follows must be inside the `try`
    except Exception as error:  # noqa: BLE001 - the account has it
        return None, error, answer, end, ran and (transaction is None or transaction.started)


async def run_async(  # noqa: C901, PLR0912 - as `run`
    guard: GuardContext,
    request: Request,
    wrapped: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: bool = False,
) -> Account:
    """Run one guarded call and return its account; see `run`."""
    if guard.context.tracer is not None and not traced:
        return await _trace_run_async(guard.context.tracer, guard, request, wrapped, args, kwargs)
    answer: Grant | Duplicate | None = None
    transaction: Transaction | None = None
    end: End | None = None
    ran = False
    try:
        answer = await claim_async(guard, request)
        if isinstance(answer, Grant) and is_late(request, answer.leased_at):
            answer = await renew_or_run_without_async(guard, answer)
        if isinstance(answer, Duplicate):
            if not guard.options.shadow:
                return answer_duplicate(guard, request, answer)
            answer = grant_in_shadow(guard, request, answer)

        work = wrapped
        if guard.options.sink is not None:
            transaction = Transaction(guard.context, answer, wrapped, encode_ending)
            work = transaction.apply_async
        if guard.retry:
            work = functools.partial(cast("Callable[..., Awaitable[Any]]", to_async(guard.retry)), work)
        ran = True
        with start_lease(guard.context, answer) as lease:
            try:
                result = await work(*args, **kwargs)
                if result.__class__ not in ENDED:
                    refuse_unfinished(result)
            except BaseException as error:
                lease.end_work()
                ending = ending_of_failure(guard, answer, transaction, error)
                end = await end_claim_async(guard, answer, ending, lease)
                raise
            try:
                lease.end_work()
                ending = ending_of_result(guard, answer, transaction, result)
                end = await end_claim_async(guard, answer, ending, lease)
            except BaseException:  # of a signal handler, as in `run`; a cancellation has handed the heartbeat over
                if end is None and not lease.is_handed_over:
                    ending = ending_of_result(guard, answer, transaction, result)
                    end = await end_claim_async(guard, answer, ending, lease)
                raise
        if transaction is not None and transaction.stored is not None:
            return answer_stored(guard, answer, transaction.stored)
        if end is not COMPLETED:
            raise_after_end(answer, end)
        return result, None, answer, end, True  # noqa: TRY300 - what it follows must be inside the `try`
    except asyncio.CancelledError as error:
        if is_cancelled() or not ran:
            raise
        return None, error, answer, end, transaction is None or transaction.started  # raised by the work
    except Exception as error:  # noqa: BLE001 - the account has it
        return None, error, answer, end, ran and (transaction is None or transaction.started)


def _trace_run(
    tracer: Tracer,
    guard: GuardContext,
    request: Request,
    wrapped: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Account:
    with tracer.once(guard.options.scope, request.key) as step:
        account = run(guard, request, wrapped, args, kwargs, traced=True)
        step.note(judge(request, account), replayed_trace(account))
        return account


async def _trace_run_async(
    tracer: Tracer,
    guard: GuardContext,
    request: Request,
    wrapped: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Account:
    with tracer.once(guard.options.scope, request.key) as step:
        account = await run_async(guard, request, wrapped, args, kwargs, traced=True)
        step.note(judge(request, account), replayed_trace(account))
        return account


# -- claim ------------------------------------------------------------------------------------------------------------


def claim(guard: GuardContext, request: Request) -> Grant | Duplicate:
    """Claim the key and wait for another owner if the request says so. Without the store apply `on_store_error`."""
    cache, evictions = guard.cache, 0
    if cache is not None:
        evictions = cache.evictions
        if (cached := cache.lookup(request.record[0], request.fingerprint)) is not None:
            return answer_from_cache(guard, request, cached)
    sent_at = monotonic()
    try:
        reply = send_claim(guard.context, request)
        if reply.state == "in_progress" and request.wait:
            if (error := own_wait_error(guard.context, request, reply.left_ms)) is not None:
                guard.context.counters.add("once.in_progress")
                return Duplicate(reply, error=error)
            reply = wait_for_owner(guard.context, request)
    except StoreError as failure:
        return claim_in_process(guard, request, failure)
    return record_claim(guard, request, reply, sent_at, evictions)


async def claim_async(guard: GuardContext, request: Request) -> Grant | Duplicate:
    """Claim the key, and wait for another owner if the request says so; see `claim`."""
    cache, evictions = guard.cache, 0
    if cache is not None:
        evictions = cache.evictions
        if (cached := cache.lookup(request.record[0], request.fingerprint)) is not None:
            return answer_from_cache(guard, request, cached)
    sent_at = monotonic()
    try:
        pending = (guard.context._aio_link or guard.context.aio_link).start(build_claim(request, False))
        try:  # as `send_claim_async`, without another coroutine: it costs a call 1 % of its instructions
            reply = await pending.answer
        except (NotDurable, asyncio.CancelledError) as interruption:
            await take_back(guard.context, request, pending, interruption)
            raise
        if reply.state == "in_progress" and request.wait:
            if (error := own_wait_error(guard.context, request, reply.left_ms)) is not None:
                guard.context.counters.add("once.in_progress")
                return Duplicate(reply, error=error)
            reply = await wait_for_owner_async(guard.context, request)
    except StoreError as failure:
        return claim_in_process(guard, request, failure)
    return record_claim(guard, request, reply, sent_at, evictions)


def answer_from_cache(guard: GuardContext, request: Request, cached: CacheEntry) -> Duplicate:
    """Return what a duplicate gets for a cached reply. A value that no caller can change is decoded once for all."""
    guard.context.counters.add_each("once.remembered", COUNTER_NAMES[cached.reply.state])
    if cached.shared_result is not None:
        return cached.shared_result
    duplicate = decide(request, cached.reply)
    if duplicate.error is None and type(duplicate.value) in _IMMUTABLE_TYPES:
        cached.shared_result = duplicate
    return duplicate


def send_claim(context: Context, request: Request, waited: bool = False) -> ClaimReply:
    """Send a claim and return its reply.

    If the claim was granted but not replicated as `durability` asks, release it and raise NotDurable.
    """
    try:
        return (context._link or context.link).run(build_claim(request, waited))
    except NotDurable:
        undo(context, request)
        raise


async def send_claim_async(context: Context, request: Request, waited: bool = False) -> ClaimReply:
    """Send a claim and return its reply; see `send_claim`.

    If the caller is cancelled, a background task waits for the reply and releases a granted claim.
    """
    pending = context.aio_link.start(build_claim(request, waited))
    try:
        return await pending.answer
    except (NotDurable, asyncio.CancelledError) as error:
        await take_back(context, request, pending, error)
        raise


async def take_back(
    context: Context, request: Request, pending: PendingCall[ClaimReply], error: NotDurable | asyncio.CancelledError
) -> None:
    """Take back a claim whose caller does not run: at once, or in the background if the caller was cancelled."""
    if isinstance(error, NotDurable):
        await undo_async(context, request)
    else:
        context.aio_link.spawn(undo_when_answered(context, request, pending))


def build_claim(request: Request, waited: bool) -> Call[ClaimReply]:
    """Build the call that claims the key, or marks it with `at_most_once`."""
    options, claims = request.options, request.claims
    if options.at_most_once:
        return claims.mark(request.record, request.owner, options.retention, request.fingerprint)
    wait = 0 if request.wait is None else 2 if waited else 1
    if claims.plain and not (request.fingerprint or waited):
        plain = claims.plain_claim(request.record, request.owner, options, wait)
        if plain is not None:
            return plain
    return claims.claim(
        request.record,
        request.owner,
        options.lease,
        options.retention,
        request.fingerprint,
        options.max_attempts,
        options.on_lease_loss == "hold",
        wait,
    )


def undo(context: Context, request: Request) -> None:
    """Release a claim whose work did not start, with one try and no retries. A mark stays."""
    if not request.options.at_most_once:
        with suppress(StoreError):
            context.link.run(build_undo(request), within=0)


async def undo_async(context: Context, request: Request) -> None:
    """Release a claim whose work did not start; see `undo`."""
    if not request.options.at_most_once:
        with suppress(StoreError):
            await context.aio_link.run(build_undo(request), within=0)


async def undo_when_answered(context: Context, request: Request, pending: PendingCall[ClaimReply]) -> None:
    """Wait for the reply to the claim of a cancelled caller, and release the claim if it was granted."""
    try:
        reply = await pending.outcome()
        if reply.state == "started" and not request.options.at_most_once:
            await context.aio_link.run(build_undo(request))
    except StoreError as error:
        facts = log_facts(request)
        log.warning(
            "once.cancelled_claim_left scope=%r key=%r: %s", *facts.values(), one_line(error),
            extra=facts | {"error": str(error)},
        )  # fmt: skip


def wait_for_owner(context: Context, request: Request) -> ClaimReply:
    """Claim again when the other owner ends, or its lease does, as long as the request waits. Return the last reply."""
    until = monotonic() + cast(int, request.wait) / 1000
    with context.link.waiting(request.record[0]) as waiter:
        # Claim again after subscribing, because the owner may have ended before the subscription.
        while (reply := send_claim(context, request, waited=True)).state == "in_progress":
            if (seconds := pause(reply, until)) <= 0:
                break
            waiter.wait(seconds)
    return reply


async def wait_for_owner_async(context: Context, request: Request) -> ClaimReply:
    """Claim again when the other owner ends, or its lease does; see `wait_for_owner`."""
    until = monotonic() + cast(int, request.wait) / 1000
    async with context.aio_link.waiting(request.record[0]) as wake:
        while (reply := await send_claim_async(context, request, waited=True)).state == "in_progress":
            if (seconds := pause(reply, until)) <= 0:
                break
            await wait_for_wakeup(wake, seconds)
    return reply


def pause(reply: ClaimReply, until: float) -> float:
    """Return how long to wait for another owner, in seconds, until this time at most.

    A wake-up ends the wait. The poll covers a lost wake-up, at the latest when the lease may end.
    """
    return min(until - monotonic(), 1.0, max(reply.left_ms / 1000, 0.01))


def claim_in_process(guard: GuardContext, request: Request, error: StoreError) -> Grant | Duplicate:
    """Apply `on_store_error`: raise, run unguarded, or guard the run within this process."""
    policy = guard.options.on_store_error
    if policy == "raise" or isinstance(error, UnexpectedData | DecodeError):
        raise error
    guard.context.counters.add(f"once.store_error.{policy}")
    facts = log_facts(request)
    log.error(
        "once.store_error scope=%r key=%r policy=%s: %s", *facts.values(), policy, one_line(error),
        extra=facts | {"policy": policy, "error": str(error)},
    )  # fmt: skip
    if policy == "run":
        return Grant(request, UNASKED)
    answer = guard.local.claim(request)
    if isinstance(answer, ClaimReply):
        return decide(request, answer)
    return Grant(request, UNASKED, guarded_by="process", local=answer)


# -- decide -----------------------------------------------------------------------------------------------------------


def record_claim(
    guard: GuardContext, request: Request, reply: ClaimReply, sent_at: float, evictions: int
) -> Grant | Duplicate:
    """Count the reply to a claim, and cache a done key. Return what was granted, or what a duplicate gets."""
    counters = guard.context.counters
    if reply.state != "started":
        counters.add(COUNTER_NAMES[reply.state])
        if reply.state == "held":
            guard.context.activity.note_held(request.options.scope, text_of(request.key))
        if guard.cache is not None and reply.state == "done" and reply.left_ms > 0:
            guard.cache.store(request.record[0], request.fingerprint, reply, reply.left_ms, evictions)
        return decide(request, reply)
    counters.add("once.started")
    if request.options.history:
        note_run(guard.context, request, reply, "started")
    if reply.taken_over:
        counters.add("once.taken_over")
        facts = log_facts(request)
        log.warning(
            "once.taken_over scope=%r key=%r token=%d attempt=%d", *facts.values(), reply.token, reply.attempt,
            extra=facts | {"token": reply.token, "attempt": reply.attempt},
        )  # fmt: skip
        note_run(guard.context, request, reply, "taken_over")
    if guard.options.at_most_once:
        return Grant(request, reply, guarded_by="mark")
    return Grant(request, reply, sent_at, "lease", evictions)


def decide(request: Request, reply: ClaimReply) -> Duplicate:
    """Return what a duplicate gets for a reply that grants nothing."""
    options = request.options
    if reply.state == "done":
        return _decide_done(request, reply)
    if reply.state == "in_progress":
        if options.shadow or (options.on_in_progress == "skip" and request.wait is None):
            return Duplicate(reply)
        return Duplicate(reply, error=AlreadyInProgress(text_of(request.key), reply.left_ms / 1000, options.scope))
    if reply.state == "shared_failure":
        try:
            kind, text = decode_failure(reply)
        except DecodeError as error:
            kind, text = "unknown", f"it cannot be decoded: {error}"
        return Duplicate(reply, error=SharedFailure(text_of(request.key), kind, text, options.scope))
    return Duplicate(reply, error=rejection_error(reply, request.key, options.scope))


def _decide_done(request: Request, reply: ClaimReply) -> Duplicate:
    """Return what a duplicate of a done key gets."""
    options = request.options
    if options.on_done == "skip":
        return Duplicate(reply)
    if reply.kind != VALUE:
        return _decide_without_value(request, reply)
    try:
        codec, returns = options.codec, options.returns
        value = codec.decode(reply.result) if returns is None else restore(codec.decode_stored(reply.result), returns)
    except (DecodeError, InvalidArgument, TypeError, ValueError) as error:
        return Duplicate(reply, error=_result_unavailable(request, f"it cannot be decoded: {error}"))
    if options.on_done == "raise":
        return Duplicate(reply, error=AlreadyDone(text_of(request.key), value, options.scope))
    return Duplicate(reply, value)


def _decide_without_value(request: Request, reply: ClaimReply) -> Duplicate:
    """Return what a duplicate of a key gets that is done without a stored value."""
    name, options = text_of(request.key), request.options
    if reply.kind == FAILURE:
        try:
            return Duplicate(reply, error=ReplayedFailure(name, *decode_failure(reply), options.scope))
        except DecodeError as error:
            return Duplicate(reply, error=_result_unavailable(request, f"it cannot be decoded: {error}"))
    if options.on_done == "raise":
        return Duplicate(reply, error=AlreadyDone(name, None, options.scope))
    why = _NOTHING_STORED if options.at_most_once else reply.result.decode(errors="replace")
    return Duplicate(reply, error=_result_unavailable(request, why))


def _result_unavailable(request: Request, why: str) -> ResultUnavailable:
    return ResultUnavailable(text_of(request.key), why, request.options.scope)


def decode_failure(reply: ClaimReply) -> tuple[str, str]:
    """Return the type and the text of a stored failure. Raise DecodeError if they are damaged."""
    decoded = _FAILURES.decode(reply.result)
    if not (isinstance(decoded, tuple) and [*map(type, decoded)] == [str, str]):  # pyright: ignore[reportUnknownArgumentType]
        raise DecodeError("expected the type and the text of a failure")
    return cast("tuple[str, str]", decoded)


def rejection_error(reply: ClaimReply, key: Key, scope: str) -> IdemgateError | None:
    """Return the error of a reply that is not "started", "in_progress" or "done", else None."""
    if reply.state == "reused":
        return KeyReused(text_of(key), scope)
    if reply.state == "held":
        return OutcomeUnknown(text_of(key), reply.attempt, scope)
    if reply.state == "exhausted":
        return AttemptsExhausted(text_of(key), reply.attempt, scope)
    return LeaseLost(text_of(key), reply.token, scope) if reply.state == "stale" else None


def answer_duplicate(guard: GuardContext, request: Request, duplicate: Duplicate) -> Account:
    """Return the account of a call that does not run. Call `on_replay` with the verdict on it if its key is done."""
    account: Account = duplicate.value, duplicate.error, duplicate, None, False
    if (hook := guard.options.on_replay) is not None and duplicate.reply.state == "done":
        try:
            call_blocking(hook, (text_of(request.key), judge(request, account)), {})
        except Exception as error:  # noqa: BLE001 - the hook must not change what the caller gets
            record_hook_failure(guard.context, request, "on_replay", error)
    return account


def answer_stored(guard: GuardContext, grant: Grant, stored: Ending) -> Account:
    """Answer a call as a duplicate whose result a sink had."""
    request = grant.request
    return answer_duplicate(guard, request, decide(request, build_done_reply(grant, stored)))


def grant_in_shadow(guard: GuardContext, request: Request, duplicate: Duplicate) -> Grant:
    """Count and log a duplicate that runs because of `shadow`."""
    guard.context.counters.add("once.shadowed")
    facts, state = log_facts(request), duplicate.reply.state
    log.info("once.would_drop scope=%r key=%r state=%s", *facts.values(), state, extra=facts | {"state": state})
    return Grant(request, duplicate.reply)


# -- run under a lease ------------------------------------------------------------------------------------------------


def is_late(request: Request, leased_at: float) -> bool:
    """Return True if less than half of a lease is left that counts from this time of the process's clock."""
    return monotonic() - leased_at > request.options.lease / 2000


def renew_or_run_without(guard: GuardContext, grant: Grant) -> Grant | Duplicate:
    """Renew a lease of which less than half is left. Without the store apply `on_store_error`."""
    try:
        return renew(guard.context, grant)
    except StoreError as error:
        return claim_in_process(guard, grant.request, error)


async def renew_or_run_without_async(guard: GuardContext, grant: Grant) -> Grant | Duplicate:
    """Renew a lease of which less than half is left; see `renew_or_run_without`."""
    try:
        return await renew_async(guard.context, grant)
    except StoreError as error:
        return claim_in_process(guard, grant.request, error)


def renew(context: Context, grant: Grant) -> Grant:
    """Renew a lease before its work starts. Raise LeaseLost if the work must not start."""
    renewed = grant.with_lease_from(monotonic())
    if not may_start(context, renewed, context.link.run(build_renewal(grant))):
        undo(context, grant.request)
        raise lease_lost_error(grant)
    return renewed


async def renew_async(context: Context, grant: Grant) -> Grant:
    """Renew a lease before its work starts; see `renew`."""
    renewed, link = grant.with_lease_from(monotonic()), context.aio_link
    try:
        renewal = await link.run(build_renewal(grant))
    except asyncio.CancelledError:
        link.spawn(undo_async(context, grant.request))
        raise
    if not may_start(context, renewed, renewal):
        await undo_async(context, grant.request)
        raise lease_lost_error(grant)
    return renewed


def may_start(context: Context, renewed: Grant, renewal: Renewal) -> bool:
    """Return True if a lease that was renewed may start its work. Count and log one that may not."""
    if renewal != "lost" and not is_late(renewed.request, renewed.leased_at):
        return True
    context.counters.add("once.not_started")
    facts = log_facts(renewed.request)
    log.warning("once.not_started scope=%r key=%r", *facts.values(), extra=facts)
    return False


def start_lease(context: Context, grant: Grant, with_current: bool = True) -> Heartbeat | NoHeartbeat:
    """Return the block that renews a lease, if there is one. Raise DecodeError for a corrupt checkpoint.

    With `with_current`, `current()` works in it until the work ends.
    """
    reply = grant.reply
    if grant.guarded_by == "lease":
        recovered = context.codec.decode(reply.checkpoint) if reply.checkpoint else None
        execution = Execution(context, grant, reply.token, reply.attempt, recovered)
        return Heartbeat(context, grant, execution, with_current)
    token, attempt = (reply.token, reply.attempt) if reply.state == "started" else (0, 1)
    return NoHeartbeat(Execution(context, grant, token, attempt, saves=grant.request.options.shadow))


# -- end --------------------------------------------------------------------------------------------------------------


def ending_of_result(
    guard: GuardContext, grant: Grant, transaction: Transaction | None, result: object
) -> Ending | None:
    """Return what completes the key, or None if nothing is claimed. A sink has encoded its result before.

    A result that holds unfinished work ends the run as its refusal would; see `unfinished_of`.
    """
    if grant.guarded_by not in ("lease", "process"):
        return None
    if grant.request.options.at_most_once:
        return build_ending(NOT_STORED)
    if transaction is not None:
        return transaction.ending
    try:
        return encode_ending(grant.request.options, result)
    except InvalidArgument as unfinished:
        kind, data, loses_model, _ = ending_of_failure(guard, grant, None, unfinished) or build_ending(RELEASE)
        return kind, data, loses_model, unfinished


def unfinished_of(ending: Ending | None) -> InvalidArgument | None:
    """Return the refusal of a result that holds unfinished work, if that is the ending."""
    return ending[3] if ending is not None and ending[0] != VALUE and isinstance(ending[3], InvalidArgument) else None


def encode_ending(options: OnceOptions, result: object, failure: Exception | None = None) -> Ending:
    """Encode the result for the completion.

    If the result cannot be stored, the key is done without one. The effect has happened and must not run again.
    `failure` is what a first try raised. If the second succeeds, a signal handler had raised it: keep the error.

    Raises:
        InvalidArgument: work that has not ended is in the result.
    """
    try:
        data = options.codec.encode(result, "result")
        loses_model = type(result) not in _IMMUTABLE_TYPES and _check_restorable(options, result, data)
    except Exception as error:  # noqa: BLE001 - the effect has happened, so the key must become done
        if failure is None:
            return encode_ending(options, result, error)
        refuse_unfinished_inside(result)
        return build_ending(NOT_STORED, describe_unstored(error)[:500].encode(errors="replace"))
    return VALUE, data, loses_model, None if failure is None else failure.__cause__ or failure


def _check_restorable(options: OnceOptions, result: object, data: bytes) -> bool:
    """Return True if duplicates get a model in an encoded result as a dict, because no annotation leads to a model.

    Raises:
        InvalidArgument: no duplicate could get the result.
    """
    if options.returns is None:
        return may_hold_model(data) and holds_stored(options.codec.decode_stored(data))
    if options.on_done == "skip":
        return False
    fix = "Annotate what holds it with its class, or return plain data"
    try:
        restored = restore(options.codec.decode_stored(data), options.returns)
    except DecodeError as error:
        raise InvalidArgument("result", type(result), f"cannot be restored: {error.why}", fix) from error
    # Another class has the same name.
    if type(restored) is not type(result) or (may_hold_model(data) and has_other_class(restored, result)):
        raise InvalidArgument("result", type(result), "would come back as another class", fix)
    return False


def ending_of_failure(
    guard: GuardContext, grant: Grant, transaction: Transaction | None, error: BaseException
) -> Ending | None:
    """Return what follows from an exception of the work by `on_error`, or None if nothing is claimed."""
    options = guard.options
    if grant.guarded_by not in ("lease", "process"):
        return None
    if transaction is not None and not transaction.started:  # a run that did not start is no attempt
        if isinstance(error, AlreadyInProgress) and grant.guarded_by == "lease":
            guard.context.counters.add("once.sink_busy")
        return build_ending(UNDO)
    if not isinstance(error, Exception):
        if options.at_most_once:
            return build_ending(NOT_STORED)
        return build_ending(KEEP if options.holds_interrupted else RELEASE)
    ending = build_ending(NOT_STORED) if options.at_most_once else _decide_on_error(guard, grant, error)
    if ending[0] != VALUE:
        _note_failure(guard.context, grant, error, ending)
        note_run(guard.context, grant.request, grant.reply, "failed", last_line(error))
    return ending


def _note_failure(context: Context, grant: Grant, error: BaseException, ending: Ending) -> None:
    """Note a failure of the work for the reports of this process."""
    from idemgate.store.retry import is_of_store  # late: it imports redis-py

    request, attempt = grant.request, grant.reply.attempt
    is_final = ending[0] not in (RELEASE, UNDO, KEEP) or is_last(request, attempt)
    if (failure := error if is_final else failure_of(error)) is None:
        return
    # A call inside of a delivery or of another call is repeated with that one, which is reported itself.
    may_follow = not is_final and ending[0] != UNDO and not is_inside()
    context.activity.note_failure(
        request.options.scope, text_of(request.key), attempt, last_line(failure), 0.0 if may_follow else None,
        is_of_store(failure),
    )  # fmt: skip


def _decide_on_error(guard: GuardContext, grant: Grant, error: Exception) -> Ending:
    """Return what `on_error` decides about an exception of the work."""
    try:
        return _apply_on_error(guard.context, grant.request, error)
    except Exception as broken:  # noqa: BLE001 - a function of the user may raise anything
        if not callable(guard.options.on_error):  # a signal handler raised; the policy holds all the same
            return _apply_on_error(guard.context, grant.request, error)
        record_hook_failure(guard.context, grant.request, "on_error", broken)
        error.add_note(f"idemgate released the key, because on_error failed: {type(broken).__name__}")
        return _build_release(error)


def _apply_on_error(context: Context, request: Request, error: Exception) -> Ending:
    """Apply `on_error` to an exception of the work. Raise what it raises, and InvalidArgument for an unknown choice."""
    policy = request.options.on_error
    if callable(policy):
        policy = policy(error)
        if policy not in get_args(OnError):
            raise InvalidArgument("on_error", policy, "the callable returned an unknown choice", _ON_ERROR)
    if policy in ("store", "complete") and request.options.sink is not None:  # its transaction is rolled back
        refusal = InvalidArgument("on_error", policy, "a sink stores nothing then", "Return 'release' or 'keep'")
        record_hook_failure(context, request, "on_error", refusal)
        return _build_release(error)
    if policy == "complete":
        return encode_ending(request.options, None)
    if policy == "store":
        return build_ending(FAILURE, _encode_failure(error))
    if policy == "keep":
        return build_ending(KEEP)
    return _build_release(error, _encode_failure(error) if policy == "share" else b"")


def _build_release(error: Exception, failure: bytes = b"") -> Ending:
    """Return the ending that releases the key after a failure."""
    return build_ending(UNDO if counts_no_attempt(error) else RELEASE, failure)


def _encode_failure(error: BaseException) -> bytes:
    """Return the stored form of an exception: its type and the first 1,000 characters of its text."""
    text = message_of(error).encode(errors="replace").decode()
    return _FAILURES.encode((f"{type(error).__module__}.{type(error).__qualname__}", text[:1000]))


def end_claim(guard: GuardContext, grant: Grant, ending: Ending | None) -> End | None:
    """Send the end of a claim. Count a store error instead of raising it.

    The work has run, so an error must not make the caller run it again.
    """
    if ending is None or ending[0] == KEEP or grant.guarded_by == "process":
        return end_without_store(guard, grant, ending)
    context = guard.context
    if context.tracer is not None:
        ending = add_run_trace(context.tracer.run_trace(), ending)
    try:
        held = (context._link or context.link).run(build_end(grant, ending), *guard.end_timeouts)
    except StoreError as error:
        return record_unended(guard, grant, ending, error)
    return record_end(guard, grant, ending, held)


async def end_claim_async(
    guard: GuardContext, grant: Grant, ending: Ending | None, lease: Heartbeat | NoHeartbeat
) -> End | None:
    """Send the end of a claim; see `end_claim`.

    If the caller is cancelled, a background task renews the lease until the reply.
    """
    if ending is None or ending[0] == KEEP or grant.guarded_by == "process":
        return end_without_store(guard, grant, ending)
    if guard.context.tracer is not None:
        ending = add_run_trace(guard.context.tracer.run_trace(), ending)
    link = guard.context._aio_link or guard.context.aio_link
    pending = link.start(build_end(grant, ending), *guard.end_timeouts)
    try:
        held = await pending.answer
    except StoreError as error:
        return record_unended(guard, grant, ending, error)
    except asyncio.CancelledError:
        assert isinstance(lease, Heartbeat), "only a leased claim sends its end"
        lease.hand_over()
        link.spawn(record_end_later(guard, grant, ending, lease, pending.outcome()))
        raise
    return record_end(guard, grant, ending, held)


async def record_end_later(
    guard: GuardContext, grant: Grant, ending: Ending, heartbeat: Heartbeat, pending: asyncio.Future[bool]
) -> None:
    """Wait for the reply to the end of a cancelled call, then stop its heartbeat."""
    try:
        record_end(guard, grant, ending, await pending)
    except StoreError as error:
        record_unended(guard, grant, ending, error)
    finally:
        heartbeat.stop()


def end_without_store(guard: GuardContext, grant: Grant, ending: Ending | None) -> End | None:
    """End a run that has nothing to send: its claim is left to its lease, or only this process guards it."""
    if ending is None:
        return None
    if grant.guarded_by == "process":
        guard.local.end(grant.request, ending)
    return End(ending[0], interruption=ending[3])


def add_run_trace(trace: bytes, ending: Ending) -> Ending:
    """Return the ending with the trace of the run, which is stored with its result or its failure."""
    kind, data, loses_model, interruption = ending
    if kind not in (VALUE, FAILURE):
        return ending
    return kind, add_trace(data, trace), loses_model, interruption


def replayed_trace(account: Account) -> bytes:
    """Return the trace of the run whose end a duplicate gets; b"" for any other call, and if none was stored."""
    answer = account[2]
    return read_trace(answer.reply.result) if isinstance(answer, Duplicate) and answer.reply.state == "done" else b""


def build_end(grant: Grant, ending: Ending) -> Call[bool]:
    """Build the call that completes or releases the claim."""
    request, (kind, data, _, _) = grant.request, ending
    claims, retention = request.claims, request.options.retention
    if kind in COMPLETES:
        reply = grant.reply
        return claims.complete(request.record, request.owner, reply.token, retention, kind, data, reply.stored)
    return claims.release(request.record, request.owner, retention, kind == UNDO, data)


def record_end(guard: GuardContext, grant: Grant, ending: Ending, held: bool) -> End:
    """Count the reply to the end of a claim and cache a completed key."""
    (kind, _, loses_model, interruption), request, counters = ending, grant.request, guard.context.counters
    done = kind == VALUE or kind == NOT_STORED  # noqa: PLR1714 - faster than `in`
    if not held:
        counters.add("once.lost")
        facts = log_facts(request)
        log.warning("once.lost scope=%r key=%r", *facts.values(), extra=facts)
        note_run(guard.context, request, grant.reply, "lost")
        return End(kind, done and guard.options.sink is not None, None, interruption)  # a committed row decides
    if request.options.history:
        note_run(guard.context, request, grant.reply, "released" if kind in (RELEASE, UNDO) else "completed")
    if not done:
        return End(kind, interruption=interruption)
    counters.add("once.completed")
    if kind == NOT_STORED:
        counters.add("once.result_not_stored")
        facts = log_facts(request)
        log.warning("once.result_not_stored scope=%r key=%r", *facts.values(), extra=facts)
    if loses_model and not guard.warned_of_model:
        guard.warned_of_model = True
        _warn_of_model(request)
    if guard.cache is not None:
        reply, retention = build_done_reply(grant, ending), guard.options.retention
        guard.cache.store(request.record[0], request.fingerprint, reply, retention, grant.evictions)
    return COMPLETED if kind == VALUE and interruption is None else End(kind, True, None, interruption)


def record_unended(guard: GuardContext, grant: Grant, ending: Ending, error: StoreError) -> End:
    """Count and log a store error at the end of a claim."""
    name = "once.not_durable" if isinstance(error, NotDurable) else "once.completion_lost"
    guard.context.counters.add(name)
    facts = log_facts(grant.request)
    log.error("%s scope=%r key=%r: %s", name, *facts.values(), one_line(error), extra=facts | {"error": str(error)})
    return End(ending[0], True, error, ending[3])


def build_done_reply(grant: Grant, ending: Ending) -> ClaimReply:
    """Return the reply that the next caller would get."""
    reply, retention = grant.reply, grant.request.options.retention
    return ClaimReply("done", reply.token, reply.attempt, retention, kind=ending[0], result=ending[1])


def raise_after_end(grant: Grant, end: End | None) -> None:
    """Raise what the caller must learn after the work has returned: an interruption, or a lost lease."""
    if end is None:
        return
    if end.interruption is not None:
        raise end.interruption
    if not end.held and grant.request.options.on_lost == "raise":
        raise lease_lost_error(grant)


def end_kept(guard: GuardContext, grant: Grant, result: object, error: BaseException | None = None) -> Verdict[Any]:
    """End a claim that `on_error` kept: store the result, or apply `on_error` to the later error. Blocking.

    Return the verdict. Renew the lease with `start_lease` as long as the claim is kept.
    """
    if error is None:
        ending = ending_of_result(guard, grant, None, result)
        error = unfinished_of(ending)
    else:
        ending = ending_of_failure(guard, grant, None, error)
    return judge(grant.request, (result, error, grant, end_claim(guard, grant, ending), True))


# -- a call without a key ---------------------------------------------------------------------------------------------


def runs_without_key(guard: GuardContext, error: MissingKey) -> bool:
    """Apply `on_missing_key`: return True to run unguarded and False to skip the call, or raise the error."""
    policy = guard.options.on_missing_key
    if policy == "raise":
        raise error
    guard.context.counters.add(f"once.missing_key.{policy}")
    log.warning("once.missing_key scope=%s policy=%s", guard.options.scope, policy, extra={"policy": policy})
    return policy == "run"


def run_without_key(
    guard: GuardContext, error: MissingKey, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Verdict[Any]:
    """Apply `on_missing_key` and return the verdict."""
    if (verdict := _judge_without_key(guard, error)) is not None:
        return verdict
    try:
        return judge_unguarded(call_blocking(wrapped, args, kwargs))
    except Exception as failure:  # noqa: BLE001 - the verdict has it
        return judge_unguarded(None, failure)


async def run_without_key_async(
    guard: GuardContext,
    error: MissingKey,
    wrapped: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verdict[Any]:
    """Apply `on_missing_key` and return the verdict; see `run_without_key`."""
    if (verdict := _judge_without_key(guard, error)) is not None:
        return verdict
    try:
        return judge_unguarded(await call_async(wrapped, args, kwargs))
    except Exception as failure:  # noqa: BLE001 - the verdict has it
        return judge_unguarded(None, failure)


def _judge_without_key(guard: GuardContext, error: MissingKey) -> Verdict[Any] | None:
    """Return the verdict on a message without a key, or None to run it unguarded."""
    try:
        return None if runs_without_key(guard, error) else Verdict("skipped")
    except MissingKey as missing:
        return verdict_of(missing)


# -- logs -------------------------------------------------------------------------------------------------------------


def record_hook_failure(context: Context, request: Request, hook: str, error: Exception) -> None:
    """Count and log an error of a function that the user passed as an option."""
    context.counters.add("once.hook_failed")
    facts = log_facts(request)
    log.error(
        "once.hook_failed scope=%r key=%r hook=%s", *facts.values(), hook,
        exc_info=error, extra=facts | {"hook": hook},
    )  # fmt: skip


def _warn_of_model(request: Request) -> None:
    """Log that a model is replayed as a dict, because no return annotation names it."""
    facts = log_facts(request)
    log.warning(
        "once.model_not_annotated scope=%r key=%r: no return annotation names its model, or it cannot be evaluated, "
        "so duplicates get a dict",
        *facts.values(), extra=facts,
    )  # fmt: skip


COUNTER_NAMES = {state: f"once.{state}" for state in get_args(ReplyState)}
"""The counter of each reply to a claim."""
_IMMUTABLE_TYPES = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of results that all duplicates can share, because no caller can change them."""
_FAILURES = Codec()
"""A codec with the default limit. `max_result_bytes` is meant for results and does not apply to failures."""
_ON_ERROR = f"Use one of {', '.join(map(repr, get_args(OnError)))}"
_NOTHING_STORED = "at_most_once stores no result; use on_done='skip' or 'raise'"
