"""The errors of an inbox."""

from __future__ import annotations

from idemgate import AlreadyInProgress, IdemgateError

__all__ = ["ConnectionInUse", "EndedByHandler", "RowLocked"]


class RowLocked(AlreadyInProgress):
    """Another transaction holds the row of this key, or the whole SQLite database, and did not end in time.

    The handler did not run. `retry_after` is the lock time-out of the inbox in seconds.
    """

    def __init__(self, key: str, retry_after: float, scope: str = "claim") -> None:
        super().__init__(key, retry_after, scope)
        self._text = (
            f"another transaction holds the row of {key!r} (scope {scope!r}) in the database, and did not end within "
            f"lock_timeout={retry_after:g} s. Try again, or pass a longer lock_timeout to the inbox"
        )


class EndedByHandler(IdemgateError, RuntimeError):
    """The handler ended the transaction of its run with COMMIT or ROLLBACK, or tried to.

    A commit in SQLite, or by a connection of psycopg, SQLAlchemy or Django, was refused. Everything was rolled back. So
    was a run that raised `psycopg.Rollback`.

    A COMMIT that PostgreSQL has executed stays. The row of the key was committed with it, so the handler does not run
    again, and duplicates get ResultUnavailable. What was rolled back is undone, and so is the row: the handler may run
    again.
    """

    def __init__(self, key: str, scope: str) -> None:
        super().__init__(key, scope)
        self._text = (
            f"the handler of {key!r} (scope {scope!r}) ended its transaction, which idemgate commits after the "
            "handler returns. Leave out COMMIT and ROLLBACK. To undo the run, raise an exception of your own. "
            "Use another connection for what must commit apart, and a savepoint for an error of SQL that is caught: "
            "a session of SQLAlchemy whose flush fails rolls back"
        )
        self.key = key
        self.scope = scope


class ConnectionInUse(IdemgateError, RuntimeError):
    """The connection for a run cannot begin a transaction, because it is in one. The handler did not run."""

    def __init__(
        self, status: str, fix: str = "Let the source return one that nothing else uses, such as `pool.connection`"
    ) -> None:
        super().__init__(status, fix)
        self._text = f"the connection for this run cannot begin a transaction of its own (status {status}). {fix}"
        self.status = status
