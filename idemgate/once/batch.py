"""Claims of a batch: asked together, kept alive together, ended together."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from idemgate.core.calls import Call
from idemgate.core.durations import Duration
from idemgate.core.many import each
from idemgate.core.passage import Passage
from idemgate.errors import BadInput, StoreError
from idemgate.once.asking import asked_together, claimed_together
from idemgate.once.claim import AioClaim, Claim, Claimed, block_ended

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["AioClaimBatch", "ClaimBatch", "answers", "completing", "releasing"]

C = TypeVar("C", bound=Claimed)


class _Batch(list[C]):
    """What both flavours have in common."""

    def __init__(self, gate: Gate, claims: Iterable[C]) -> None:
        super().__init__(claims)
        self._gate = gate
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

    def _leave_block(self) -> list[C]:
        """Those that the block gives back: its body has not ended them."""
        for claim in self._inside:
            claim._leave_block()
        return [claim for claim in self._inside if claim._held]


class ClaimBatch(_Batch[Claim]):
    """The claims of `gate.claim_many`: a list, in the order of the keys.

    In a `with` block heartbeats keep all that were granted, in one round trip; leaving the block releases those that
    its body has not completed, whether or not it raised. `current()` knows none of them, `claim.lease_lost` says what
    it would say. A claim's own block may stand inside: `with claim:`.
    """

    def ask(self) -> Self:
        """Asks, if nobody did yet; `gate.claim_many` does."""
        if not self._asked:
            self._hear(asked_together(self._gate, self._passages))
        return self

    def __enter__(self) -> Self:
        self._enter_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if held := self._leave_block():
            block_ended(self._gate, held, self._gate.link.run_each(releasing(self._gate, held)), error)


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
            self._hear(await claimed_together(self._gate, self._passages))
        return self

    async def __aenter__(self) -> Self:
        await self._ask()
        self._enter_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if held := self._leave_block():
            block_ended(self._gate, held, await self._gate.aio.link.run_each(releasing(self._gate, held)), error)


def completing(gate: Gate, pairs: Iterable[tuple[Claimed, object]], retention: Duration | None) -> list[Call[bool]]:
    """The calls of `complete_many`, all of them built before any claim counts as ended."""
    given = [_pair(pair) for pair in each(pairs, "pairs", _PAIRS)]
    claims = _ours(gate, "pairs", _PAIRS, [claim for claim, _ in given])
    calls = [
        claim._completing(result, retention, f"pairs[{place}]")
        for place, (claim, (_, result)) in enumerate(zip(claims, given, strict=True))
    ]
    return [claim._ending(call) for claim, call in zip(claims, calls, strict=True)]


def releasing(gate: Gate, claims: Iterable[Claimed]) -> list[Call[bool]]:
    """The calls of `release_many`."""
    given = _ours(gate, "claims", _CLAIMS, list(each(claims, "claims", _CLAIMS)))
    return [claim._ending(claim._passage.release()) for claim in given]


def answers(outcomes: Sequence[Any]) -> list[bool]:
    """Whether each was still held; raises the first error there is."""
    for one in outcomes:
        if isinstance(one, StoreError):
            raise one
    return list(outcomes)


def _pair(pair: Any) -> tuple[Any, object]:
    if pair.__class__ is not tuple or len(pair) != 2:
        raise BadInput("pairs", type(pair).__name__, "not a claim and its result", _PAIRS)
    return pair


def _ours(gate: Gate, name: str, fix: str, claims: list[Any]) -> list[Claimed]:
    for place, claim in enumerate(claims):
        if not isinstance(claim, Claimed) or claim._gate is not gate:
            raise BadInput(f"{name}[{place}]", type(claim).__name__, "not a claim of this gate", fix)
    return claims


_PAIRS = "Pass (claim, result) tuples, of claims of this gate"
_CLAIMS = "Pass a list of claims of this gate"
