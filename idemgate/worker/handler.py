"""The calls of a topic's handler."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any

from idemgate.core.keys import Key, step_key
from idemgate.core.validation import ENDED, refuse_unfinished
from idemgate.core.verdict import HANDLED, Verdict, judge_error
from idemgate.guard.current import Execution, check_step, set_current
from idemgate.guard.decorator import build_judge, build_judge_async, is_guarded
from idemgate.store.context import Context, trace, trace_async
from idemgate.topics.messages import Delivery

__all__ = ["Handler", "build_run", "build_run_async"]

Handler = Callable[[Delivery[Any]], Any]


def build_run(handler: Handler, context: Context) -> Callable[[Delivery[Any]], Verdict[Any]]:
    """Return a function that runs a blocking handler and returns the verdict on its delivery.

    Call it in a thread that never receives a Ctrl-C, each time in a context of its own.
    """
    judge = build_judge(handler) if is_guarded(handler) else None

    def run(delivery: Delivery[Any]) -> Verdict[Any]:
        execution = DeliveryExecution(delivery, context)
        try:
            set_current(execution)
            if judge is not None:
                return judge(delivery)
            value = handler(delivery)
            if value is None:
                return HANDLED
            if value.__class__ not in ENDED and value.__class__ is not CoroutineType:  # the event loop awaits it
                refuse_unfinished(value)
            return Verdict("handled", value, ran=True)
        except BaseException as error:  # noqa: BLE001 - any exception concerns this delivery only
            return judge_error(error)
        finally:
            execution._inside = False

    return run if context.tracer is None else trace(run, context.tracer.process)


def build_run_async(handler: Handler, context: Context) -> Callable[[Delivery[Any]], Coroutine[Any, Any, Verdict[Any]]]:
    """Return a coroutine function that runs an async handler and returns the verdict. Run it in a task of its own.

    Handler exceptions never travel through a task or a future. SystemExit would end the event loop, and StopIteration
    would never arrive. Only KeyboardInterrupt does: the user pressed Ctrl-C.
    """
    judge = build_judge_async(handler) if is_guarded(handler) else None

    async def run(delivery: Delivery[Any]) -> Verdict[Any]:
        execution = DeliveryExecution(delivery, context)
        try:
            set_current(execution)
            if judge is not None:
                return await judge(delivery)
            value = await handler(delivery)
            if value is None:
                return HANDLED
            if value.__class__ not in ENDED:
                refuse_unfinished(value)
            return Verdict("handled", value, ran=True)
        except KeyboardInterrupt:  # Ctrl-C, not an error of the handler
            raise
        except BaseException as error:  # noqa: BLE001 - any exception concerns this delivery only
            return judge_error(error)
        finally:
            execution._inside = False

    return run if context.tracer is None else trace_async(run, context.tracer.process)


class DeliveryExecution(Execution):
    """The object that `current()` returns inside a topic's handler: a view of its delivery.

    `_inside` is False once the handler has ended: tasks that outlive it may wait for the result of its delivery.
    """

    __slots__ = ("_delivery",)
    # Of the class, because each delivery makes an instance:
    _saves, _block, _outer = False, None, None
    recovered: object = None

    def __init__(self, delivery: Delivery[Any], context: Context) -> None:
        # No super().__init__(): it needs the attempt, which is known only after the message is unpacked.
        self.token: int = delivery.token
        self._context = context
        self._delivery = delivery
        self._inside = True

    def _identity(self) -> tuple[str, str, Key]:
        return self._context.namespace, "topic", self._delivery.raw_key

    @property
    def attempt(self) -> int:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._delivery.attempt

    @property
    def lease_lost(self) -> bool:
        return self._delivery.lost

    @property
    def cancel_requested(self) -> bool:
        return self._delivery.cancelled

    @property
    def holds_claim(self) -> bool:
        return False

    @property
    def has_ended(self) -> bool:
        return not self._inside

    def key_for(self, step: str) -> str:
        """Return a key for one step of this work; see `Execution.key_for`. It follows from `delivery.id`."""
        return step_key(self._context.namespace, "topic", self._delivery.id, check_step(step))

    def delivers(self, context: Context, topic: str, key: bytes) -> bool:
        mine, delivery = self._context, self._delivery
        return (
            self._inside
            and not delivery.lost
            and delivery.raw_key == key
            and delivery.topic == topic
            and mine.namespace == context.namespace
            and mine.endpoint == context.endpoint
        )
