"""What a type checker says of the outbox: the payload is that of the topic."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from idemgate_sql.sqlite import Inbox

from idemgate import Gate, Topic


@dataclass
class Order:
    id: str


orders: Topic[Order] = Gate("redis://localhost").topic("orders")


def write(inbox: Inbox, connection: sqlite3.Connection, order: Order, plain: Topic) -> None:
    inbox.trigger(connection, orders, "k", order, delay="1m")
    inbox.trigger(connection, orders.aio, "k", order)
    inbox.trigger(connection, plain, "k", {"any": "thing"})
    inbox.trigger_many(connection, orders, [("k", order)])
    inbox.trigger(connection, orders, "k", "a text")  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
    inbox.trigger_many(connection, orders, [("k", 5)])  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
