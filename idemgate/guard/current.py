"""The facts of the guarded run or the delivery that code is part of."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token

from idemgate.core.calls import Call
from idemgate.core.keys import Key, text_of
from idemgate.errors import NoCurrentExecution
from idemgate.store.context import Context

__all__ = ["AioExecution", "Execution", "current", "enter", "executing", "leave"]

Save = Callable[[object], "tuple[Context, Call[bool]]"]
"""Builds the call that keeps a checkpoint, and names the gate that carries it."""
_current: ContextVar[Execution] = ContextVar("idemgate_current")


class Execution:
    """The guarded run or delivery that this code is part of; get it with `idemgate.current()`.

    `token` is the fencing token: a later owner of this key has a higher one. It is 0 where the call runs unguarded.
    Tokens of different keys do not compare. A token does not prevent a second effect after a crash; an idempotency key
    that is stored in the transaction of the effect does.

    `attempt` is 1 for the first. `lease_lost` turns true when the lease is known to be lost: stop.
    `recovered` is what an earlier attempt stored with `checkpoint`, None if nothing. `aio.checkpoint` is the awaiting
    form.
    """

    __slots__ = ("_ended", "_key", "_lost", "_save", "attempt", "recovered", "token")

    def __init__(self, key: Key, token: int, attempt: int, recovered: object, save: Save | None) -> None:
        self._key = key
        self.token = token
        self.attempt = attempt
        self._lost = False
        self._ended = False
        self.recovered = recovered
        self._save = save

    @property
    def key(self) -> str:
        """The idempotency key, or the key of the message, as text. Its scope is not part of it."""
        return text_of(self._key)

    @property
    def lease_lost(self) -> bool:
        return self._lost

    def end(self) -> None:
        """Mark the work as ended: from now on a refused renewal is no loss, because the claim is being completed or
        released."""
        self._ended = True

    @property
    def ended(self) -> bool:
        return self._ended

    def lose(self) -> bool:
        """Note that the heartbeat found no lease. Return whether it is lost, rather than ended."""
        if not self._ended:
            self._lost = True
        return not self._ended

    def checkpoint(self, data: object) -> bool:
        """Store a note for the next attempt, in case this one does not finish. One round trip.

        It makes the window for a second effect smaller and does not close it. Return False if the lease is lost:
        nothing was written. Raise InvalidArgument if the data cannot be stored.
        """
        context, call = self._checkpoint(data)
        return self._noted(context.link.run(call))

    @property
    def aio(self) -> AioExecution:
        return AioExecution(self)

    def _checkpoint(self, data: object) -> tuple[Context, Call[bool]]:
        if self._save is None:
            raise NoCurrentExecution(
                "checkpoint() works inside a function guarded with once; this is not one, or it runs unguarded"
            )
        return self._save(data)

    def _noted(self, held: bool) -> bool:
        if not held:
            self.lose()
        return held


class AioExecution:
    """The async form of an `Execution`."""

    __slots__ = ("_execution",)

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    async def checkpoint(self, data: object) -> bool:
        """Store a note for the next attempt; see `Execution.checkpoint`."""
        context, call = self._execution._checkpoint(data)
        return self._execution._noted(await context.aio_link.run(call))


def current() -> Execution:
    """Return the guarded run or delivery that the caller is part of. Raise NoCurrentExecution if there is none."""
    try:
        return _current.get()
    except LookupError:
        raise NoCurrentExecution(
            "current() was called outside of a guarded function and outside of a topic's handler"
        ) from None


enter: Callable[[Execution], Token[Execution]] = _current.set
"""Make `current()` return this execution, until `leave` gets the token that this returned."""
leave: Callable[[Token[Execution]], None] = _current.reset
"""Make `current()` return the execution of before."""


@contextmanager
def executing(execution: Execution) -> Generator[Execution]:
    """Make `current()` return this execution inside the block."""
    reset = enter(execution)
    try:
        yield execution
    finally:
        leave(reset)
