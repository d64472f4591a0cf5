"""The execution that the running code is part of: a guarded call or a delivery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol
from weakref import ReferenceType, ref

from idemgate.core.calls import Call
from idemgate.core.keys import Key, step_key, text_of
from idemgate.errors import AlreadyInProgress, InvalidArgument, LeaseLost, NoCurrentExecution
from idemgate.guard.request import Grant, Request
from idemgate.store.context import Context

__all__ = [
    "AioExecution",
    "Execution",
    "check_step",
    "current",
    "current_claim",
    "get_current",
    "get_held",
    "hold",
    "is_inside",
    "own_wait_error",
    "set_current",
    "set_held",
    "waits_for_own_delivery",
]

_current: ContextVar[Execution | None] = ContextVar("idemgate_current", default=None)


class HeldBatch(Protocol):
    """Claims that are held together until the block or the call that made them ends."""

    def owns(self, context: Context, record: tuple[bytes]) -> bool:
        """Return whether it holds the claim of a record in the store of `context`."""
        ...


_held: ContextVar[tuple[ReferenceType[HeldBatch], ...]] = ContextVar("idemgate_held", default=())
"""The batches around the running code. Weak: a signal handler may keep a block from being left."""


class Execution:
    """The guarded call or delivery that the running code is part of. Get it with `idemgate.current()`.

    Attributes:
        token: the fencing token. A later owner of this key has a higher one. It is 0 where the call runs unguarded.
            Tokens of different keys do not compare. A token does not prevent a second effect after a crash. An
            idempotency key that is stored in the transaction of the effect does.
        attempt: the number of this attempt; 1 is the first.
        lease_lost: True once the lease is known to be lost: stop.
        cancel_requested: True once `gate.cancel` was called for this key and a heartbeat learned it: stop.
        recovered: the checkpoint of an earlier attempt, or None.
        aio: the async form, for `await current().aio.checkpoint(...)`.
    """

    __slots__ = (
        "_block",
        "_cancelled",
        "_context",
        "_ended",
        "_grant",
        "_inside",
        "_lost",
        "_ordinals",
        "_outer",
        "_saves",
        "attempt",
        "recovered",
        "token",
    )

    def __init__(
        self,
        context: Context,
        grant: Grant,
        token: int,
        attempt: int,
        recovered: object = None,
        saves: bool = True,
    ) -> None:
        # Each guarded call makes an instance, so what `grant` says is read when it is asked for.
        self._context = context
        self._grant = grant
        self._ordinals: Counter[str] | None = None
        self._block: Callable[[], object] | None = None
        self._inside, self._outer = True, _current.get() if token > 0 else None
        self.token: int = token
        self.attempt: int = attempt
        self._lost = self._ended = self._cancelled = False
        self.recovered: object = recovered
        self._saves = saves

    def _identity(self) -> tuple[str, str, Key]:
        """Return the namespace, the scope and the key."""
        request = self._grant.request
        return request.claims.namespace, request.options.scope, request.key

    @property
    def key(self) -> str:
        """The idempotency key, or the key of the message, as text without its scope."""
        return text_of(self._identity()[2])

    @property
    def lease_lost(self) -> bool:
        """True once the lease is known to be lost: stop."""
        return self._lost

    @property
    def cancel_requested(self) -> bool:
        """True once `gate.cancel` was called for this key and a heartbeat learned it: stop."""
        return self._cancelled

    def cancel(self) -> None:
        """Record that `gate.cancel` asks this run to stop."""
        self._cancelled = True

    def key_for(self, step: str) -> str:
        """Return a key for one step of this work, to hand to a payment provider or another API. Sends nothing.

        It is a UUID of 36 characters. Every attempt of this key, by any process, gets the same one. It differs between
        namespaces, scopes, keys and steps. In the handler of a topic it follows from `delivery.id`, because a topic
        delivers many messages of one key.

        Args:
            step: the name of the step, "charge" or "refund".

        Raises:
            InvalidArgument: the step is no text, or empty.
        """
        return step_key(*self._identity(), check_step(step))

    def end_with(self, block: object) -> None:
        """End this execution for `current()` when `block` is gone, which a signal handler kept from being left."""
        self._block = ref(block)

    @property
    def is_orphaned(self) -> bool:
        """True if the block of this execution is gone."""
        return self._block is not None and self._block() is None

    @property
    def holds_claim(self) -> bool:
        """True if this run was granted the claim of its key. False for the delivery of a topic."""
        return self.token > 0

    def next_event_id(self, topic: str, key: bytes, payload: bytes) -> str:
        """Return the event id of a trigger that this run makes. Another attempt of the run makes the same ids.

        Triggers of one topic, key and payload are numbered. The payload is part of the id, so that an attempt that
        makes its triggers in another order loses none.
        """
        if self._ordinals is None:
            self._ordinals = Counter()
        trigger = f"trigger:{len(topic)}:{topic}:{len(key)}:{key.hex()}:{payload.hex()}"
        self._ordinals[trigger] += 1
        return step_key(*self._identity(), f"{trigger}:{self._ordinals[trigger]}")

    def end(self) -> None:
        """Mark the work as ended. A renewal that is refused from now on is no loss, because the claim is ending."""
        self._ended = True
        self._inside, self._outer = False, None

    def leave(self) -> None:
        """Mark the block of this run as left. Tasks that outlive it keep no chain of runs that ended."""
        self._inside, self._outer = False, None

    def runs_inside(self, context: Context, record: tuple[bytes]) -> bool:
        """Return whether this run, or one around it, owns the claim of a record in the store of `context`."""
        execution: Execution | None = self
        while execution is not None and execution.holds_claim:
            owns = execution._grant.request.record == record and execution._context.endpoint == context.endpoint
            if owns and execution._inside and not execution.lease_lost and not execution.is_orphaned:
                return True
            execution = execution._outer
        return False

    def delivers(self, context: Context, topic: str, key: bytes) -> bool:  # noqa: ARG002 - for the delivery
        """Return whether this is the delivery of a key of a topic in the store of `context`. A guarded call is none."""
        return False

    @property
    def has_ended(self) -> bool:
        """True once the work has ended."""
        return self._ended

    def lose(self) -> bool:
        """Record that a heartbeat found no lease. Return True if the lease is lost, and False if the work ended."""
        if not self._ended:
            self._lost = True
        return not self._ended

    def check_lease(self) -> None:
        """Raise LeaseLost if the lease is known to be lost."""
        if self.lease_lost:
            raise LeaseLost(self.key, self.token, self._identity()[1])

    def checkpoint(self, data: object) -> bool:
        """Store data for the next attempt, in case this one does not finish. One round trip.

        It shortens the time in which a crash can cause a second effect. It does not prevent one.

        Returns:
            False if the lease is lost; nothing was written.

        Raises:
            InvalidArgument: the data cannot be stored.
            NoCurrentExecution: the call is not guarded.
            StoreError: the store did not answer.
        """
        context, call = self._checkpoint(data)
        return self._record_reply(context.link.run(call))

    @property
    def aio(self) -> AioExecution:
        """The async form."""
        return AioExecution(self)

    def _checkpoint(self, data: object) -> tuple[Context, Call[bool]]:
        if not self._saves:
            raise NoCurrentExecution(
                "checkpoint() works inside a function guarded with once; this is not one, or it runs unguarded"
            )
        request = self._grant.request  # the codec of its options limits results
        packed = self._context.codec.encode(data, "checkpoint")
        return self._context, request.claims.checkpoint(request.record, request.owner, packed)

    def _record_reply(self, held: bool) -> bool:
        if not held:
            self.lose()
        return held


class AioExecution:
    """The async form of an `Execution`."""

    __slots__ = ("_execution",)

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    async def checkpoint(self, data: object) -> bool:
        """Store data for the next attempt; see `Execution.checkpoint`."""
        context, call = self._execution._checkpoint(data)
        return self._execution._record_reply(await context.aio_link.run(call))


def check_step(step: object) -> str:
    """Return the name of a step of `key_for`. Raise InvalidArgument if it is no text, or empty."""
    if not isinstance(step, str) or not step:
        raise InvalidArgument("step", step, "not the name of a step", "Pass text, such as 'charge'")
    return step


def current_claim() -> Execution | None:
    """Return the guarded call that the caller is part of, if it holds its claim, else None."""
    execution = _current.get()
    return execution if execution is not None and execution.holds_claim and not execution.is_orphaned else None


def is_inside() -> bool:
    """Return True if the caller is part of a guarded call or delivery. One that an interrupt left behind is none."""
    execution = _current.get()
    return execution is not None and not execution.has_ended and not execution.is_orphaned


def own_wait_error(context: Context, request: Request, left_ms: int) -> AlreadyInProgress | None:
    """Return the error for a wait that could not end: the caller is part of the run that owns the key.

    Tasks and threads that inherit the context of the run are part of it, because the run mostly waits for them.
    """
    execution = _current.get()
    if (execution is None or not execution.runs_inside(context, request.record)) and not any(
        (batch := held()) is not None and batch.owns(context, request.record) for held in _held.get()
    ):
        return None
    key, scope = text_of(request.key), request.options.scope
    error = AlreadyInProgress(key, left_ms / 1000, scope)
    error._text = (
        f"{key!r} is owned by the run or batch that this call is part of (scope {scope!r}), so it would wait for "
        "its own end. Use another key or scope for the inner call, or make it afterwards"
    )
    return error


def waits_for_own_delivery(context: Context, topic: str, key: bytes) -> bool:
    """Return whether the caller is part of the delivery of this key, whose end a wait for its result needs."""
    execution = _current.get()
    while execution is not None:
        if execution.delivers(context, topic, key):
            return True
        execution = execution._outer
    return False


def current() -> Execution:
    """Return the guarded call or delivery that the caller is part of.

    Raises:
        NoCurrentExecution: the caller is not part of one.
    """
    if (execution := _current.get()) is None or execution.is_orphaned:
        raise NoCurrentExecution("current() was called outside of a guarded function and outside of a topic's handler")
    return execution


get_current: Callable[[], Execution | None] = _current.get
"""Return the current execution, or None."""
set_current: Callable[[Execution | None], object] = _current.set
"""Make `current()` return this execution. To restore the previous one, pass what `get_current` returned before.

The tokens of the context variable are not used: a signal handler may raise before a token is stored.
"""

get_held: Callable[[], tuple[ReferenceType[HeldBatch], ...]] = _held.get
"""Return the batches around the running code."""
set_held: Callable[[tuple[ReferenceType[HeldBatch], ...]], object] = _held.set
"""Restore the batches that `get_held` returned."""


def hold(batch: HeldBatch) -> None:
    """Add a batch around the running code."""
    _held.set((*_held.get(), ref(batch)))
