"""The transactions of one call in the database of a sink, which stores the key and the result beside the effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from idemgate.core import keys
from idemgate.core.validation import call_async, call_blocking
from idemgate.errors import KeyReused
from idemgate.guard.options import OnceOptions
from idemgate.guard.request import FAILURE, NOT_STORED, VALUE, Ending, Grant, build_ending
from idemgate.guard.sink.protocol import AioSink, Sink, SinkEntry, StoredKind, StoredResult
from idemgate.store.context import Context

__all__ = ["Transaction"]

_KINDS: dict[bytes, StoredKind] = {VALUE: "value", NOT_STORED: "none", FAILURE: "failure"}
_CODES = {kind: code for code, kind in _KINDS.items()}


class Transaction:
    """The work of one call, wrapped in a transaction of the sink. A retry policy makes more than one.

    The row of the sink decides whether the work runs. The record in the store keeps other owners waiting, and answers
    duplicates without the database. Only this object writes its attributes: `started` is True once the work was called.
    `ending` is the encoded result. If the sink had that of an earlier run, it is `stored`, too.
    """

    def __init__(
        self,
        context: Context,
        grant: Grant,
        work: Callable[..., Any],
        encode: Callable[[OnceOptions, object], Ending],
    ) -> None:
        self.started: bool = False
        self.ending: Ending | None = None
        self.stored: Ending | None = None
        self._context = context
        self._grant = grant
        self._request = grant.request
        self._sink = grant.request.options.sink
        self._work = work
        self._encode = encode

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Run the work in a transaction of the sink. Return its result, or None if `stored` has one."""
        result: Any = None

        def work() -> StoredResult:
            nonlocal result
            self._start()
            result = call_blocking(self._work, args, kwargs)
            return self._store(result)

        self._finish(cast(Sink, self._sink).apply(self._build_entry(), work))
        return result

    async def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Run the work in a transaction of the sink; see `apply`."""
        result: Any = None

        async def work() -> StoredResult:
            nonlocal result
            self._start()
            result = await call_async(self._work, args, kwargs)
            return self._store(result)

        self._finish(await cast(AioSink, self._sink).apply(self._build_entry(), work))
        return result

    def _build_entry(self) -> SinkEntry:
        request, reply = self._request, self._grant.reply
        scope, key = keys.row_name(request.claims.namespace, request.options.scope, request.key)
        token = reply.token if reply.state == "started" else 0
        return SinkEntry(scope, key, request.fingerprint, token, request.options.retention / 1000)

    def _start(self) -> None:
        """Record that the work starts. An earlier transaction of this call has left nothing."""
        self.started, self.ending = True, None

    def _store(self, result: object) -> StoredResult:
        """Return the result as the sink stores it."""
        self.ending = self._encode(self._request.options, result)
        kind, data, _, _ = self.ending
        return StoredResult(_KINDS[kind], data, self._request.fingerprint)

    def _finish(self, stored: StoredResult | None) -> None:
        """Apply the answer of the sink. Raise KeyReused if its row has another fingerprint.

        A sink that suppresses the error of the handler has stored nothing: RuntimeError says so.
        """
        if stored is None:
            if self.ending is None:
                raise RuntimeError(
                    f"apply() of {self._sink!r} returned None, but the handler did not return. "
                    "Let apply() raise what work() raises"
                )
            return
        if stored.fingerprint != self._request.fingerprint:
            raise KeyReused(keys.text_of(self._request.key), self._request.options.scope)
        self.ending = self.stored = build_ending(_CODES[stored.kind], stored.data)
        self._context.counters.add("once.sink_replayed")
