"""The guard within one process for `on_store_error="local"`, used while the store is unavailable."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import NamedTuple
from weakref import ReferenceType, ref

from idemgate.core.clock import monotonic
from idemgate.guard.claim_calls import ClaimReply
from idemgate.guard.request import COMPLETES, KEEP, Ending, LocalRun, Request

__all__ = ["LocalGuard"]

LIMIT = 100_000
"""The maximum number of ended keys in memory. The oldest are evicted first."""
MAX_BYTES = 32 * 1024 * 1024
"""The maximum size of the results in memory. The oldest keys are evicted first."""


class _Ended(NamedTuple):
    """A key that ran here. It is in progress until `expiry` if `kind` is empty: `on_error="keep"`."""

    expiry: float
    fingerprint: bytes
    kind: bytes
    result: bytes


class LocalGuard:
    """The keys that this process runs, or ran while the store was unavailable, with their results.

    A run that a signal handler ended is gone, and then its key may run again.
    """

    __slots__ = ("_bytes", "_ended", "_lock", "_running")

    def __init__(self) -> None:
        self._running: dict[bytes, ReferenceType[LocalRun]] = {}
        self._ended: OrderedDict[bytes, _Ended] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def claim(self, request: Request) -> LocalRun | ClaimReply:
        """Claim a key in this process. Return its run, which the caller keeps, or what a store would have answered."""
        [record] = request.record
        with self._lock:
            owner = self._running.get(record, lambda: None)()
            if owner is not None:
                return _answer(request, owner.fingerprint, request.options.lease)
            ended = self._ended.get(record)
            left = 0 if ended is None else round((ended.expiry - monotonic()) * 1000)
            if ended is not None and left > 0:
                return _answer(request, ended.fingerprint, left, ended.kind, ended.result)
            run = LocalRun(request.fingerprint)
            self._running[record] = ref(run)
            return run

    def end(self, request: Request, ending: Ending) -> None:
        """End a run. Its key is then done, in progress for another lease, or free."""
        options, [record] = request.options, request.record
        milliseconds, kind, result = 0, b"", b""
        if ending[0] in COMPLETES:
            milliseconds, kind, result = options.retention, ending[0], ending[1]
        elif ending[0] == KEEP:
            milliseconds = options.lease
        with self._lock:
            self._running.pop(record, None)
            if (old := self._ended.pop(record, None)) is not None:
                self._bytes -= len(old.result)
            if milliseconds:
                self._ended[record] = _Ended(monotonic() + milliseconds / 1000, request.fingerprint, kind, result)
                self._bytes += len(result)
            while len(self._ended) > LIMIT or self._bytes > MAX_BYTES:
                self._bytes -= len(self._ended.popitem(last=False)[1].result)


def _answer(request: Request, fingerprint: bytes, left_ms: int, kind: bytes = b"", result: bytes = b"") -> ClaimReply:
    """Return the answer to the claim of a key that runs here, or has ended."""
    if fingerprint != request.fingerprint:
        return ClaimReply("reused")
    return ClaimReply("done" if kind else "in_progress", left_ms=left_ms, kind=kind, result=result)
