"""One call of a topic's handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from idemgate.errors import PartialFailure
from idemgate.guard.current import Execution, set_current, use_execution
from idemgate.topics.messages import Delivery

__all__ = ["SUCCESS", "Handler", "HandlerResult", "as_partial_failure", "run_async_handler", "run_blocking_handler"]

Handler = Callable[[Delivery[Any]], Any]
HandlerResult = tuple[object, BaseException | None]
"""The value a blocking handler returned, and the exception it raised. Both travel between threads as values, because
not every exception survives a future."""
SUCCESS: HandlerResult = (None, None)


async def run_async_handler(begin: Callable[[], Any], delivery: Delivery[Any]) -> BaseException | None:
    """Run an async handler; return its exception, the `PartialFailure` that it returned, or None.

    Handler exceptions never travel through a task or a future. SystemExit would end the event loop, and StopIteration
    would never arrive.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    try:
        with use_execution(DeliveryExecution(delivery)):
            return as_partial_failure(await begin())
    except KeyboardInterrupt:  # Ctrl-C, not an error of the handler
        raise
    except BaseException as error:  # noqa: BLE001 - any exception concerns this delivery only
        return error


def run_blocking_handler(handler: Handler, delivery: Delivery[Any]) -> HandlerResult:
    """Run a blocking handler in the current thread, which never receives a Ctrl-C."""
    set_current(DeliveryExecution(delivery))  # not reset: the caller runs each job in its own context
    try:
        result = handler(delivery)
    except BaseException as error:  # noqa: BLE001 - any exception concerns this delivery only
        return None, error
    return SUCCESS if result is None else (result, None)


def as_partial_failure(result: object) -> PartialFailure | None:
    """Return a handler's result if it is a `PartialFailure`; every other result means success."""
    return result if isinstance(result, PartialFailure) else None


class DeliveryExecution(Execution):
    """The object that `current()` returns inside a topic's handler: a view of its delivery."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery[Any]) -> None:
        # No super().__init__(): it needs the attempt, which is known only after the message is unpacked.
        self._key, self.token, self._lost = delivery.raw_key, delivery.token, False
        self._save = self.recovered = None
        self._delivery = delivery

    @property
    def attempt(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._delivery.attempt

    @attempt.setter
    def attempt(self, _: int) -> None:
        """Ignore the value: the attempt belongs to the delivery."""

    @property
    def lease_lost(self) -> bool:
        return self._delivery.lost
