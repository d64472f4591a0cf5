"""A payment that is credited once, whatever happens around it: `python example.py`.

The database is a file of SQLite in a temporary folder, and the store is part of this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from idemgate_sql.sqlite import Inbox

from idemgate import Gate, IdemgateError

FOLDER = Path(os.environ.get("EXAMPLE_FOLDER") or tempfile.mkdtemp())
DATABASE = FOLDER / "shop.db"
gate = Gate(f"embedded://{FOLDER / 'store'}", namespace="sql-example")
inbox = Inbox(DATABASE)


@gate.once(key="{payment[id]}", scope="pay", lease="1s", on_in_progress="wait", sink=inbox)
def pay(payment: dict[str, Any], then: Callable[[], object] | None = None) -> dict[str, Any]:
    """Credit an account and return a receipt. The credit, the key and the receipt are committed together."""
    insert = "INSERT INTO credits VALUES (?, ?)"
    inbox.connection().execute(insert, (payment["account"], payment["amount"]))
    if then is not None:
        then()
    return {"receipt": payment["id"]}


def die() -> None:
    """End this process at once, as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """Fail after the credit."""
    raise ConnectionError("the printer of receipts is away")


def commit() -> None:
    """End the transaction, which is refused."""
    inbox.connection().commit()


def show(what: str, payment: dict[str, Any], then: Callable[[], object] | None = None) -> None:
    """Pay, and print what the caller gets and what the database has."""
    try:
        answer: object = pay(payment, then)
    except (IdemgateError, ConnectionError) as error:
        answer = type(error).__name__
    with closing(sqlite3.connect(DATABASE)) as db:
        (count,) = db.execute("SELECT count(*) FROM credits").fetchone()
    print(f"{what}: {answer}, credits in all: {count}")


def main() -> None:
    """Pay four payments."""
    inbox.create_tables()
    with sqlite3.connect(DATABASE) as db:
        db.execute("CREATE TABLE credits (account TEXT, amount INTEGER)")
    first, second, third = ({"id": f"p{n}", "account": "ann", "amount": 5} for n in (1, 2, 3))
    show("the first call", first)
    show("a duplicate", first)
    pay.forget(first)
    show("a duplicate, after Redis has lost the record", first)
    show("a call that fails after its credit", second, fail)
    show("the same call again", second)
    killed = multiprocessing.get_context("spawn").Process(target=pay, args=(third, die))
    os.environ["EXAMPLE_FOLDER"] = str(FOLDER)
    killed.start()
    killed.join()
    print(f"a process that dies after its credit, before the commit: signal {-(killed.exitcode or 0)}")
    show("the same call again, once the lease of the dead process has ended", third)
    show("a function that commits", {"id": "p4", "account": "ann", "amount": 5}, commit)
    replayed = gate.counters["once.sink_replayed"]
    print(f"answered by the row of the inbox: {replayed}")
    gate.close()


if __name__ == "__main__":
    main()
