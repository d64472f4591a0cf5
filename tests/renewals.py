"""A lease renewal made of functions, for tests of the heartbeat thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from idemgate.core.calls import Batch
from idemgate.store.heartbeat import LeaseRenewal


class FunctionRenewal(LeaseRenewal):
    """`renew` receives the first error of the last try, or None if it succeeded."""

    def __init__(
        self, lease: float, renew: Callable[[Exception | None], Sequence[Batch[None]]], overdue: Callable[[], None]
    ) -> None:
        super().__init__(lease)
        self._renew = renew
        self._overdue = overdue
        self._error: Exception | None = None

    def renew(self) -> Sequence[Batch[None]]:
        error, self._error = self._error, None
        return self._renew(error)

    def note_error(self, error: Exception) -> None:
        self._error = error

    def overdue(self) -> None:
        self._overdue()
