"""A relay of an outbox in a process that dies (`tests/resilience/zygote.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from idemgate import Gate
from idemgate.testing import Clock
from integrations.sql.tests.flavours import FLAVOURS
from tests.resilience.points import reach

__all__ = ["PLACES", "relay", "replace_execute"]

PLACES = ("after read", "after send", "after delete", "after commit")


def relay(order: dict[str, Any]) -> Callable[[], object]:
    """Build the scene: send all rows of the outbox. Its result is a list of their number."""
    kind = FLAVOURS[order["flavour"]]
    flavour = kind.__new__(kind)  # the tables exist
    flavour.url = order["database"]
    gate = Gate(order["url"], namespace=order["namespace"], clock=Clock(order["now"]))
    topic = gate.topic("orders", merge="append", slots=4)
    inbox = flavour.open_inbox()
    one = inbox.relay(gate, batch=order["batch"])
    reach_steps(one, inbox, type(topic.aio), flavour.awaiting, order["flavour"].startswith("psycopg"))

    async def scene() -> list[int]:
        sent = 0
        while n := await one.relay_once():
            sent += n
        await gate.aio.close()
        return [sent]

    return lambda: asyncio.run(scene())


def reach_steps(one: Any, inbox: Any, topic: Any, awaiting: bool, autocommits: bool) -> None:
    """Make the process die at the steps of a relay, if its order says so."""
    statements, execute, send = one._statements, inbox.database.execute, topic.trigger_many

    def reach_after(sql: str) -> None:
        if sql in (statements.read, statements.delete):
            reach("after read" if sql == statements.read else "after delete")

    def executed(connection: Any, sql: str, params: Any) -> Any:
        found = execute(connection, sql, params)
        reach_after(sql)
        return found

    async def executed_async(connection: Any, sql: str, params: Any) -> Any:
        found = await execute(connection, sql, params)
        reach_after(sql)
        return found

    async def sent(self: Any, triggers: Any) -> Any:
        receipts = await send(self, triggers)
        reach("after send")
        return receipts

    async def committed(run: Any, sql: str, params: Any) -> Any:
        found = await run(sql, params)
        if autocommits:  # the connection of the relay commits each statement
            reach_after(sql)
        if sql == statements.delete:
            reach("after commit")
        return found

    inbox.database.execute = executed_async if awaiting else executed
    topic.trigger_many = sent
    replace_execute(one, committed)


def replace_execute(one: Any, execute: Callable[..., Any]) -> None:
    """Replace `execute` of the connections of a relay. The new one also gets the former one, as its first argument."""
    connect = one._connect

    @asynccontextmanager
    async def connected(channel: str) -> AsyncGenerator[Any]:
        async with connect(channel) as connection:
            connection.execute = partial(execute, connection.execute)
            yield connection

    one._connect = connected
