"""One call of a topic's handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from idemgate.core.keys import step_key
from idemgate.core.verdict import HANDLED, Verdict, verdict_of
from idemgate.errors import PartialFailure
from idemgate.guard.current import Execution, check_step, set_current
from idemgate.topics.messages import Delivery

__all__ = ["Handler", "judge_partial_failure", "run_async_handler", "run_blocking_handler"]

Handler = Callable[[Delivery[Any]], Any]


async def run_async_handler(
    judge: Callable[..., Awaitable[Verdict[Any]]], delivery: Delivery[Any], namespace: str
) -> Verdict[Any]:
    """Run an async handler and return the verdict on its delivery.

    Handler exceptions never travel through a task or a future. SystemExit would end the event loop, and StopIteration
    would never arrive.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    set_current(DeliveryExecution(delivery, namespace))  # not reset: the caller runs each handler in a task of its own
    try:
        return judge_partial_failure(await judge(delivery))
    except KeyboardInterrupt:  # Ctrl-C, not an error of the handler
        raise
    except BaseException as error:  # noqa: BLE001 - any exception concerns this delivery only
        return verdict_of(error)._replace(ran=True)


def run_blocking_handler(judge: Callable[..., Verdict[Any]], delivery: Delivery[Any], namespace: str) -> Verdict[Any]:
    """Run a blocking handler in the current thread, which never receives a Ctrl-C. Return the verdict."""
    set_current(DeliveryExecution(delivery, namespace))  # not reset: the caller runs each job in its own context
    try:
        return judge(delivery)
    except BaseException as error:  # noqa: BLE001 - any exception concerns this delivery only
        return verdict_of(error)._replace(ran=True)


def judge_partial_failure(verdict: Verdict[Any]) -> Verdict[Any]:
    """Return the verdict on a handler that may have returned a `PartialFailure`, which then counts as raised."""
    if verdict is HANDLED or not isinstance(verdict.value, PartialFailure):
        return verdict
    return verdict_of(verdict.value)._replace(ran=True)


class DeliveryExecution(Execution):
    """The object that `current()` returns inside a topic's handler: a view of its delivery."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery[Any], namespace: str) -> None:
        # No super().__init__(): it needs the attempt, which is known only after the message is unpacked.
        self._key, self.token, self._lost = delivery.raw_key, delivery.token, False
        self._save = self.recovered = self._block = None
        self._owner = namespace, "topic"
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

    @property
    def cancel_requested(self) -> bool:
        return self._delivery.cancelled

    @property
    def holds_claim(self) -> bool:
        return False

    def key_for(self, step: str) -> str:
        """Return a key for one step of this work; see `Execution.key_for`. It follows from `delivery.id`."""
        return step_key(*self._owner, self._delivery.id, check_step(step))
