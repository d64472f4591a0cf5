"""Claims of a batch: asked together, kept alive together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from idemgate.core.calls import Each
from idemgate.core.durations import Duration
from idemgate.core.validation import each
from idemgate.errors import InvalidArgument, StoreError
from idemgate.guard.acquire import asked_together, claimed_together
from idemgate.guard.attempt import Passage, release_each
from idemgate.guard.calls import Claims, Ending
from idemgate.guard.claim import AioClaim, Claim, Claimed, block_ended, outlast
from idemgate.store.context import Context

__all__ = ["AioClaimBatch", "ClaimBatch", "completing", "ended", "ended_by", "releasing"]

C = TypeVar("C", bound=Claimed)


class _Batch(list[C]):
    """What both flavours have in common."""

    def __init__(self, context: Context, claims: Iterable[C]) -> None:
        super().__init__(claims)
        self._context = context
        self._asked = False
        self._inside: list[C] = []

    @property
    def _passages(self) -> list[Passage]:
        return [claim._passage for claim in self]

    def _hear(self, outcomes: Sequence[Any]) -> None:
        for claim, outcome in zip(self, outcomes, strict=True):
            claim._hear(outcome)
        self._asked = True

    def _enter_block(self) -> None:
        self._inside = [claim for claim in self if claim.error is None]
        for claim in self._inside:
            claim._enter_block(inside=False)

    def _unended(self) -> list[C]:
        """Those that the block gives back: its body has not ended them."""
        return [claim for claim in self._inside if claim._held]

    def _leave_block(self) -> None:
        for claim in self._inside:
            claim._leave_block()


class ClaimBatch(_Batch[Claim]):
    """The claims of `gate.claim_many`: a list, in the order of the keys.

    In a `with` block heartbeats keep all that were granted, in one round trip; leaving the block releases those that
    its body has not tried to complete, whether or not it raised. `current()` knows none of them, `claim.lease_lost`
    says what it would say. A claim's own block may stand inside: `with claim:`.
    """

    def ask(self) -> Self:
        """Asks, if nobody did yet; `gate.claim_many` does."""
        if not self._asked:
            self._hear(asked_together(self._context, self._passages))
        return self

    def __enter__(self) -> Self:
        self._enter_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if held := self._unended():
                _, calls = releasing(self._context, held)
                block_ended(self._context, held, self._context.link.run_each(calls), error)
        finally:
            self._leave_block()


class AioClaimBatch(_Batch[AioClaim]):
    """As `ClaimBatch`, awaiting: `claims = await gate.aio.claim_many(...)`, or `async with gate.aio.claim_many(...) as
    claims`."""

    # `asyncio.gather` asks for the hash of what it awaits.
    def __hash__(self) -> int:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ask().__await__()

    async def _ask(self) -> Self:
        if not self._asked:
            self._hear(await claimed_together(self._context, self._passages))
        return self

    async def __aenter__(self) -> Self:
        await self._ask()
        self._enter_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if held := self._unended():
                _, calls = releasing(self._context, held)
                block_ended(self._context, held, await ended_by(self._context, held, calls), error)
        finally:
            self._leave_block()


async def ended_by(context: Context, claims: Sequence[Claimed], calls: Sequence[Each[bool]]) -> list[bool | StoreError]:
    """The answers to the endings of claims. Cancelled meanwhile: renewals go on until there are any."""
    link = context.aio_link
    ending = link.start_each(calls)
    try:
        return await asyncio.shield(ending)
    except asyncio.CancelledError:
        link.spawn(outlast(context, [beats for claim in claims for beats in claim._hand_over()], claims, ending))
        raise


def completing(
    context: Context, pairs: Iterable[tuple[Claimed, object]], retention: Duration | None
) -> tuple[list[Claimed], list[Each[bool]]]:
    """The claims of `complete_many` and its calls, all of them built before any claim counts as ended."""
    given = [_pair(pair) for pair in each(pairs, "pairs", _PAIRS)]
    claims = _ours(context, "pairs", _PAIRS, [claim for claim, _ in given])
    _once_each(claims)
    endings: list[Ending] = []
    for claim, (_, result) in zip(claims, given, strict=True):
        try:
            endings.append(claim._completion(result, retention))
        except InvalidArgument as error:
            name = error.name.replace("result", f"pairs[{len(endings)}]", 1)
            raise InvalidArgument(name, error.value, error.problem, error.fix) from None
    for claim in claims:
        claim._end()
    return claims, Claims(context.namespace, context.clock).complete_each(endings, context.batch_size)


def releasing(context: Context, claims: Iterable[Claimed]) -> tuple[list[Claimed], list[Each[bool]]]:
    """As `completing`, of `release_many`."""
    given = _ours(context, "claims", _CLAIMS, list(each(claims, "claims", _CLAIMS)))
    for claim in given:
        claim._answer  # noqa: B018 - raises what came instead of one, before anything is written
    calls = release_each([claim._passage for claim in given], context.batch_size)
    for claim in given:
        claim._end()
    return given, calls


def ended(claims: Sequence[Claimed], outcomes: Sequence[bool | StoreError]) -> list[bool]:
    """Whether each was still held, and counts those that were not; raises the first error there is."""
    for claim, one in zip(claims, outcomes, strict=True):
        if not isinstance(one, StoreError):
            claim._was_held(one)
    for one in outcomes:
        if isinstance(one, StoreError):
            raise one
    return cast("list[bool]", outcomes)


def _pair(pair: Any) -> tuple[Any, object]:
    if pair.__class__ is not tuple or len(pair) != 2:
        raise InvalidArgument("pairs", type(pair).__name__, "not a claim and its result", _PAIRS)
    return pair


def _ours(context: Context, name: str, fix: str, claims: list[Any]) -> list[Claimed]:
    for place, claim in enumerate(claims):
        if not isinstance(claim, Claimed) or claim._context is not context:
            raise InvalidArgument(f"{name}[{place}]", type(claim).__name__, "not a claim of this gate", fix)
    return claims


def _once_each(claims: list[Claimed]) -> None:
    if len(set(map(id, claims))) < len(claims):
        place = next(i for i, claim in enumerate(claims) if any(claim is other for other in claims[:i]))
        name, fix = f"pairs[{place}]", "Pass each claim once, with the one result that is to be kept"
        raise InvalidArgument(name, claims[place]._passage.key, "the claim of this key is there twice", fix)


_PAIRS = "Pass (claim, result) tuples, of claims of this gate"
_CLAIMS = "Pass a list of claims of this gate"
