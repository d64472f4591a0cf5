"""A guarded payment in a process that dies or stands still (`tests/resilience/zygote.py`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from idemgate import AlreadyInProgress, Gate
from idemgate.testing import Clock
from integrations.sql.tests.flavours import FLAVOURS, Handle
from tests.resilience.points import reach

__all__ = ["PLACES", "consume", "pay"]

PLACES = (
    "before insert", "after insert", "after effect", "before commit", "after commit", "after guard/complete"
)  # fmt: skip


def pay(order: dict[str, Any]) -> Callable[[], object]:
    """Build the scene: pay `order["key"]`, `order["times"]` times. Its result is the list of what the calls returned.

    A call that found another owner returns "busy".
    """
    _gate, guarded = open_payments(order, "{key}")

    async def call() -> object:
        try:
            return await guarded(order["key"])
        except AlreadyInProgress:
            return "busy"

    async def scene() -> list[object]:
        return [await call() for _ in range(order["times"])]

    return lambda: asyncio.run(scene())


def consume(order: dict[str, Any]) -> Callable[[], object]:
    """Build the scene: take the due deliveries of a topic, pay each and acknowledge it."""
    gate, guarded = open_payments(order, lambda key: key.id)
    topic = gate.topic("payments", lease=order["lease"], backoff=0, max_attempts=100)

    async def scene() -> list[object]:
        said = []
        for delivery in topic.take():
            said.append(await guarded(delivery))
            topic.ack(delivery)
        return said

    return lambda: asyncio.run(scene())


def open_payments(order: dict[str, Any], key: Any) -> tuple[Gate, Callable[[Any], Awaitable[Any]]]:
    """Connect. Return the gate, and a guarded payment of a key or of a delivery."""
    kind = FLAVOURS[order["flavour"]]
    flavour = kind.__new__(kind)  # the tables exist
    flavour.url = order["database"]
    gate = Gate(order["url"], namespace=order["namespace"], clock=Clock(order["now"]))
    inbox = flavour.open_inbox(lock_timeout=order["lock_timeout"])
    reach_steps(inbox, flavour.awaiting)

    async def body(db: Handle, message: Any) -> dict[str, str]:
        payment = getattr(message, "key", message)
        await db.execute("UPDATE stock SET n = n + 1 WHERE item = 'account'")
        await db.credit(payment)
        reach("after effect")
        time.sleep(order.get("linger", 0))  # noqa: ASYNC251 - nothing else runs here
        return {"receipt": payment}

    guarded = flavour.decorate_directly(gate, inbox, body, key=key, lease=order["lease"])

    async def call(message: Any) -> Any:
        return await guarded(message) if flavour.awaiting else guarded(message)

    return gate, call


def reach_steps(inbox: Any, awaiting: bool) -> None:
    """Make the process die at the steps of a transaction, if its order says so."""
    database, statements = inbox.database, inbox.statements
    execute, transaction = database.execute, database.transaction

    def executed(connection: Any, sql: str, params: Any) -> Any:
        if sql == statements.insert:
            reach("before insert")
        found = execute(connection, sql, params)
        reach_after(sql)
        return found

    async def executed_async(connection: Any, sql: str, params: Any) -> Any:
        if sql == statements.insert:
            reach("before insert")
        found = await execute(connection, sql, params)
        reach_after(sql)
        return found

    def reach_after(sql: str) -> None:
        if sql != statements.find:
            reach("after insert" if sql == statements.insert else "before commit")

    @contextmanager
    def transacted() -> Generator[Any]:
        with transaction() as connection:
            yield connection
        reach("after commit")

    @asynccontextmanager
    async def transacted_async() -> AsyncGenerator[Any]:
        async with transaction() as connection:
            yield connection
        reach("after commit")

    database.execute = executed_async if awaiting else executed
    database.transaction = transacted_async if awaiting else transacted
