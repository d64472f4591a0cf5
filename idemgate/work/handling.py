"""One run of a topic's handler."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from typing import Any

from idemgate.core.functions import awaited
from idemgate.core.messages import Delivery
from idemgate.errors import Failed
from idemgate.once.current import Execution, executing
from idemgate.work.threads import Threads, called

__all__ = ["handled"]

Handler = Callable[[Delivery[Any]], Any]


async def handled(handler: Handler, delivery: Delivery[Any], threads: Threads) -> BaseException | None:
    """What the handler raised, the `Failed` that it returned, or None. Its exceptions never travel through a task or a
    future: SystemExit would end the event loop with everything in it, and StopIteration would never arrive."""
    try:
        with executing(DeliveryExecution(delivery)):
            if awaited(handler):
                return _said(await handler(delivery))
            context = contextvars.copy_context()
            result, error = await threads.run(lambda: context.run(called, handler, delivery))
            if inspect.isawaitable(result):  # a plain function that hands on a coroutine
                result = await result
            return error or _said(result)
    except KeyboardInterrupt:  # somebody's Ctrl-C, not the handler's word
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it says something about this delivery only
        return error


def _said(result: object) -> Failed | None:
    return result if isinstance(result, Failed) else None


class DeliveryExecution(Execution):
    """What `current()` tells inside of a topic's handler: the delivery's own facts."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery[Any]) -> None:
        super().__init__(delivery.key, delivery.token, delivery.attempt, None, None)
        self._delivery = delivery

    @property
    def lease_lost(self) -> bool:
        return self._delivery.lost
