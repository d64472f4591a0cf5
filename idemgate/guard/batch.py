"""Claims of a batch: acquired, renewed and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from idemgate.core.calls import PerKeyCall
from idemgate.core.clock import monotonic
from idemgate.core.durations import Duration
from idemgate.core.validation import check_iterable
from idemgate.core.verdict import counts_no_attempt
from idemgate.errors import InvalidArgument, StoreError
from idemgate.guard.acquire import acquire_many, acquire_many_async, renew_late, renew_late_async
from idemgate.guard.claim import AioClaim, BaseClaim, Claim, record_block_end, renew_until_ended
from idemgate.guard.claim_calls import Claims, Completion
from idemgate.guard.current import get_held, hold, set_held
from idemgate.guard.heartbeat import EndTimeouts, end_timeouts
from idemgate.guard.keep import AioKeeper, Keep, Keeper
from idemgate.guard.request import Request
from idemgate.store.context import Context

__all__ = [
    "AioClaimBatch",
    "ClaimBatch",
    "build_completions",
    "build_releases",
    "record_ends",
    "run_ends",
    "run_ends_async",
]

C = TypeVar("C", bound=BaseClaim)
K = TypeVar("K", Keeper, AioKeeper)


class _BaseBatch(list[C]):
    """The common part of both batches."""

    def __init__(self, context: Context, claims: Iterable[C]) -> None:
        super().__init__(claims)
        self._context = context
        self._acquired = False
        self._entered: list[C] = []
        self._around = get_held()

    def _requests(self) -> list[Request]:
        return [claim._request for claim in self]

    def _give_up(self) -> None:
        """Make the next claims those of other owners; see `BaseClaim._give_up`."""
        for claim in self:
            claim._give_up()

    def _apply_replies(self, outcomes: Sequence[Any], leased_at: float) -> None:
        """Store the replies of the claims, whose leases count from this time."""
        for claim, outcome in zip(self, outcomes, strict=True):
            claim._apply_reply(outcome, leased_at)
        self._acquired = True

    def _enter_block(self) -> None:
        """Start the heartbeats of the granted claims."""
        self._entered = [claim for claim in self if claim.error is None]
        for claim in self._entered:
            claim._enter_block(with_current=False)
        self._around = get_held()
        hold(self)

    def owns(self, context: Context, record: tuple[bytes]) -> bool:
        """Return whether its block holds the claim of a record in the store of `context`."""
        return self._context.endpoint == context.endpoint and any(
            claim._is_held and not claim.lease_lost and claim._request.record == record for claim in self._entered
        )

    def _held_claims(self, error: BaseException | None) -> list[C]:
        """Return the claims that the block must release, because its body has not ended them."""
        if error is not None and self._entered and self._entered[0]._must_hold(error):
            return []  # the claims share their options
        return [claim for claim in self._entered if claim._is_held]

    def _has_lost_all(self) -> bool:
        """Return True if the block held claims, and all of them are lost."""
        held = [claim for claim in self._entered if claim.started]
        return bool(held) and all(claim.lease_lost for claim in held)

    @property
    def _is_done(self) -> bool:
        """True if nothing is to do: each key is done or was refused."""
        return all(claim.state == "done" for claim in self._entered)

    def _leave_block(self) -> None:
        """Stop the heartbeats."""
        set_held(self._around)
        for claim in self._entered:
            claim._leave_block()
        self._entered = []


class ClaimBatch(_BaseBatch[Claim]):
    """The claims of `gate.claim_many`: a list in the order of the keys.

    In a `with` block a heartbeat renews all granted claims in one round trip. Leaving the block releases the claims
    that the body has not tried to complete, also when it raised. `current()` does not know these claims; use
    `claim.lease_lost`. A claim may have a block inside this one: `with claim:`.
    """

    def __init__(
        self, context: Context, claims: Iterable[Claim], keep: Callable[[float], object] | None = None
    ) -> None:
        super().__init__(context, claims)
        self._keeper = _build_keeper(Keeper, context, self._requests(), keep)

    def acquire(self) -> Self:
        """Send the claims unless they were sent; `gate.claim_many` does this."""
        if not self._acquired:
            requests, sent_at = self._requests(), monotonic()
            try:
                outcomes = acquire_many(self._context, requests)
            except BaseException:
                self._give_up()
                raise
            self._apply_replies(*renew_late(self._context, requests, outcomes, sent_at))
        return self

    def __enter__(self) -> Self:
        self._enter_block()
        if self._keeper is not None and not self._is_done:
            self._keeper.start_work(self._has_lost_all)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if held := self._held_claims(error):
                _, calls = build_releases(self._context, held, undo=counts_no_attempt(error))
                outcomes = run_ends(self._context, held, calls, completes=False)
                record_block_end(self._context, held, outcomes, error)
        finally:
            self._leave_block()
            if self._keeper is not None:
                self._keeper.__exit__()


class AioClaimBatch(_BaseBatch[AioClaim]):
    """The async form of `ClaimBatch`.

    Use `claims = await gate.aio.claim_many(...)` or `async with gate.aio.claim_many(...) as claims`.
    """

    def __init__(self, context: Context, claims: Iterable[AioClaim], keep: Keep | None = None) -> None:
        super().__init__(context, claims)
        self._keeper = _build_keeper(AioKeeper, context, self._requests(), keep)

    # `asyncio.gather` hashes its arguments.
    def __hash__(self) -> int:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._acquire().__await__()

    async def _acquire(self) -> Self:
        """Send the claims unless they were sent."""
        if not self._acquired:
            requests, sent_at = self._requests(), monotonic()
            try:
                outcomes = await acquire_many_async(self._context, requests)
            except BaseException:
                self._give_up()
                raise
            self._apply_replies(*await renew_late_async(self._context, requests, outcomes, sent_at))
        return self

    async def __aenter__(self) -> Self:
        await self._acquire()
        self._enter_block()
        if self._keeper is not None and not self._is_done:
            self._keeper.start_work(self._has_lost_all)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if held := self._held_claims(error):
                _, calls = build_releases(self._context, held, undo=counts_no_attempt(error))
                outcomes = await run_ends_async(self._context, held, calls, completes=False)
                record_block_end(self._context, held, outcomes, error)
        finally:
            self._leave_block()
            if self._keeper is not None:
                await self._keeper.__aexit__(kind)


def _build_keeper(make: Callable[..., K], context: Context, requests: Sequence[Request], keep: Keep | None) -> K | None:
    """Return the keeper of a batch, or None if there is nothing to keep."""
    return None if keep is None or not requests else make(context.counters, requests[0].options, keep)


def _batch_timeouts(context: Context, claims: Sequence[BaseClaim], completes: bool) -> EndTimeouts:
    """Return the timeouts for ending claims together: those of the shortest lease."""
    lease = min((claim._request.options.lease for claim in claims), default=0)
    return end_timeouts(context, lease, renewed=completes and all(claim._is_renewed for claim in claims))


def run_ends(
    context: Context, claims: Sequence[BaseClaim], calls: Sequence[PerKeyCall[bool]], completes: bool
) -> list[bool | StoreError]:
    """Send the ends of claims and return the replies."""
    return context.link.run_each(calls, *_batch_timeouts(context, claims, completes))


async def run_ends_async(
    context: Context, claims: Sequence[BaseClaim], calls: Sequence[PerKeyCall[bool]], completes: bool
) -> list[bool | StoreError]:
    """Do the same as `run_ends`. If the caller is cancelled, renew the leases until the replies come."""
    link = context.aio_link
    pending = link.start_each(calls, *_batch_timeouts(context, claims, completes))
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        link.spawn(
            renew_until_ended(
                context, [heartbeat for claim in claims for heartbeat in claim._hand_over_heartbeats()], claims, pending
            )
        )
        raise


def build_completions(
    context: Context, pairs: Iterable[tuple[BaseClaim, object]], retention: Duration | None
) -> tuple[list[BaseClaim], list[PerKeyCall[bool]]]:
    """Return the claims of `complete_many` and the calls that complete them.

    All calls are built before any claim is marked as ended. Raise InvalidArgument, which names the position of the bad
    pair.
    """
    checked = [_check_pair(pair) for pair in check_iterable(pairs, "pairs", _PAIRS)]
    claims = _check_claims(context, "pairs", _PAIRS, [claim for claim, _ in checked])
    _check_unique(claims)
    endings: list[Completion] = []
    for claim, (_, result) in zip(claims, checked, strict=True):
        try:
            endings.append(claim._completion(result, retention))
        except InvalidArgument as error:
            name = error.name.replace("result", f"pairs[{len(endings)}]", 1)
            raise InvalidArgument(name, error.value, error.problem, error.fix) from None
    for claim in claims:
        claim._mark_ended()
    return claims, Claims(context.namespace, context.clock).complete_each(endings, context.batch_size)


def build_releases(
    context: Context, claims: Iterable[BaseClaim], undo: bool = False
) -> tuple[list[BaseClaim], list[PerKeyCall[bool]]]:
    """Return the claims of `release_many` and the calls that release them. Raise InvalidArgument."""
    checked = _check_claims(context, "claims", _CLAIMS, list(check_iterable(claims, "claims", _CLAIMS)))
    for claim in checked:
        claim._reply  # noqa: B018 - raises the error of the claim before anything is written
    releases = [(one.record[0], one.owner, one.options.retention, b"") for one in (claim._request for claim in checked)]
    calls = Claims(context.namespace, context.clock).release_each(releases, context.batch_size, undo)
    for claim in checked:
        claim._ending = "released"
        claim._mark_ended()
    return checked, calls


def record_ends(claims: Sequence[BaseClaim], outcomes: Sequence[bool | StoreError]) -> list[bool]:
    """Return whether each claim was still held, and count the lost ones. Raise the first StoreError."""
    for claim, outcome in zip(claims, outcomes, strict=True):
        if not isinstance(outcome, StoreError):
            claim._record_end(outcome)
    for outcome in outcomes:
        if isinstance(outcome, StoreError):
            raise outcome
    return cast("list[bool]", outcomes)


def _check_pair(pair: Any) -> tuple[Any, object]:
    """Return the pair. Raise InvalidArgument if it is no tuple of two."""
    if pair.__class__ is not tuple or len(pair) != 2:
        raise InvalidArgument("pairs", type(pair).__name__, "not a claim and its result", _PAIRS)
    return pair


def _check_claims(context: Context, name: str, fix: str, claims: list[Any]) -> list[BaseClaim]:
    """Return the claims. Raise InvalidArgument if one is no claim of this gate."""
    for index, claim in enumerate(claims):
        if not isinstance(claim, BaseClaim) or claim._context is not context:
            raise InvalidArgument(f"{name}[{index}]", type(claim).__name__, "not a claim of this gate", fix)
    return claims


def _check_unique(claims: list[BaseClaim]) -> None:
    if len(set(map(id, claims))) < len(claims):
        index = next(i for i, claim in enumerate(claims) if any(claim is other for other in claims[:i]))
        name, fix = f"pairs[{index}]", "Pass each claim once"
        raise InvalidArgument(name, claims[index]._request.key, "the claim of this key occurs twice", fix)


_PAIRS = "Pass (claim, result) tuples, of claims of this gate"
_CLAIMS = "Pass a list of claims of this gate"
