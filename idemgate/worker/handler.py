"""One run of a topic's handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from idemgate.errors import PartialFailure
from idemgate.guard.current import Execution, enter, executing
from idemgate.topics.messages import Delivery

__all__ = ["DONE", "Handler", "Ran", "handled", "ran", "said"]

Handler = Callable[[Delivery[Any]], Any]
Ran = tuple[object, BaseException | None]
"""What a blocking handler returned, and what it raised: values, because exceptions do not all survive the way back."""
DONE: Ran = (None, None)


async def handled(begin: Callable[[], Any], delivery: Delivery[Any]) -> BaseException | None:
    """What an awaiting handler raised, the `PartialFailure` that it returned, or None. Its exceptions never travel through a
    task or a future: SystemExit would end the event loop with everything in it, and StopIteration would never
    arrive."""
    try:
        with executing(DeliveryExecution(delivery)):
            return said(await begin())
    except KeyboardInterrupt:  # somebody's Ctrl-C, not the handler's word
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it says something about this delivery only
        return error


def ran(handler: Handler, delivery: Delivery[Any]) -> Ran:
    """A blocking handler, in its thread. Nobody's Ctrl-C arrives there."""
    enter(DeliveryExecution(delivery))  # in a context of its own, which ends with it
    try:
        result = handler(delivery)
    except BaseException as error:  # noqa: BLE001 - the same
        return None, error
    return DONE if result is None else (result, None)


def said(result: object) -> PartialFailure | None:
    """What a handler's result says of its delivery: only a `PartialFailure` says something."""
    return result if isinstance(result, PartialFailure) else None


class DeliveryExecution(Execution):
    """What `current()` tells inside of a topic's handler: the delivery's own facts."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery[Any]) -> None:
        # Without the one above, which would ask for all that is only known once the message is unpacked.
        self._key, self.token, self._lost = delivery.raw_key, delivery.token, False
        self._save = self.recovered = None
        self._delivery = delivery

    @property
    def attempt(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._delivery.attempt

    @attempt.setter
    def attempt(self, _: int) -> None:
        """It is the delivery's."""

    @property
    def lease_lost(self) -> bool:
        return self._delivery.lost
