"""The context of one guard, which all its calls share: its options, its caches, its timeouts."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from idemgate.core.clock import monotonic
from idemgate.core.validation import check_int, is_async
from idemgate.guard.claim_calls import ClaimReply, Claims
from idemgate.guard.current import get_current
from idemgate.guard.heartbeat import EndTimeouts, end_timeouts, register_scope
from idemgate.guard.local import LocalGuard
from idemgate.guard.options import GuardOptions, OnceOptions
from idemgate.guard.request import Duplicate
from idemgate.store.context import Context

if TYPE_CHECKING:
    import tenacity

__all__ = ["CacheEntry", "DoneCache", "GuardContext", "build_guard_context"]


class GuardContext:
    """The state that all calls of one guard share in this process.

    `warned_of_model` is True once a log record said that duplicates get a model as a dict.
    """

    def __init__(
        self, context: Context, options: OnceOptions, retry: tenacity.BaseRetrying | None, cache_size: int
    ) -> None:
        self.context = context
        self.options = options
        self.retry = retry
        self.cache: DoneCache | None = DoneCache(cache_size, _clock_of(context)) if cache_size else None
        if self.cache is not None:
            context.caches.add(self.cache)
        self.local: LocalGuard = LocalGuard()
        context.note_scope(options.scope, options.retention)
        context.bound.add(self)
        self.warned_of_model = False
        self.end_timeouts: EndTimeouts = end_timeouts(context, options.lease)

    @functools.cached_property
    def claims(self) -> Claims:
        """The builder of the calls. It is built at the first call, since `configure` may still change the namespace."""
        register_scope(self.context, self.options.scope, self.options.retention)
        return Claims(self.context.namespace, self.context.clock, self.cache is None)

    def _rebind(self) -> None:
        """Forget what belongs to the former store; see `Context.override`."""
        self.__dict__.pop("claims", None)
        self.local = LocalGuard()
        if self.cache is not None:
            self.cache.clear(_clock_of(self.context))


def _clock_of(context: Context) -> Callable[[], float]:
    return monotonic if context.clock is None else context.now


class CacheEntry:
    """The cached reply to a claim of a done key.

    `shared_result` is the answer that all duplicates share, or None until it can be shared.
    """

    __slots__ = ("reply", "shared_result")

    def __init__(self, reply: ClaimReply) -> None:
        self.reply: ClaimReply = reply
        self.shared_result: Duplicate | None = None


class DoneCache:
    """An LRU cache of keys that this process knows to be done.

    It holds the last `size` keys, each until its retention ends. Only done keys are cached, because a done key changes
    only if another process forgets it. This process then notices when the entry expires. `now` returns seconds.

    `evictions` counts the decisions of this process about keys. A reply to a claim that was sent before the last one
    is not cached: it may be older than the decision.
    """

    __slots__ = ("__weakref__", "_entries", "_now", "_size", "evictions")

    def __init__(self, size: int, now: Callable[[], float] = monotonic) -> None:
        self.evictions: int = 0
        self._size = size
        self._now = now
        self._entries: OrderedDict[bytes, tuple[float, bytes, CacheEntry]] = OrderedDict()

    def lookup(self, record: bytes, fingerprint: bytes) -> CacheEntry | None:
        """Return the entry of a record, "reused" if the fingerprint differs, or None if it is not cached."""
        stored = self._entries.get(record)
        if stored is None:
            return None
        expiry, stored_fingerprint, cached = stored
        if expiry <= self._now():
            self._entries.pop(record, None)
            return None
        return cached if stored_fingerprint == fingerprint else CacheEntry(ClaimReply("reused"))

    def store(self, record: bytes, fingerprint: bytes, reply: ClaimReply, milliseconds: int, evictions: int) -> None:
        """Cache a done record for this many milliseconds, if `evictions` is the count before its claim was sent.

        Evict the oldest entries beyond the size.
        """
        if evictions != self.evictions:
            return
        self._entries.pop(record, None)
        self._entries[record] = (self._now() + milliseconds / 1000, fingerprint, CacheEntry(reply))
        if evictions != self.evictions:  # another thread decided meanwhile, and may have evicted before the store
            self._entries.pop(record, None)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def evict(self, record: bytes) -> None:
        """Remove a record that this process forgets or resolves. Call it before the decision and after it."""
        self.evictions += 1
        self._entries.pop(record, None)

    def clear(self, now: Callable[[], float]) -> None:
        """Remove all records, and use another clock."""
        self.evictions += 1
        self._now = now
        self._entries.clear()


def build_guard_context(context: Context, checked_options: OnceOptions, options: GuardOptions) -> GuardContext:
    """Return the context of a guard. Raise InvalidArgument for an invalid `cache_size`."""
    cache_size = check_int("cache_size", options.get("cache_size", 0), 0)
    retry = options.get("retry")
    return GuardContext(context, checked_options, None if retry is None else _stop_at_lost_lease(retry), cache_size)


def _stop_at_lost_lease(retry: tenacity.BaseRetrying) -> tenacity.BaseRetrying:
    """Return a copy of a policy that starts no attempt once the lease is known to be lost. It raises LeaseLost then."""
    before: Callable[[Any], Any] | None = retry.before

    def check_lease(state: object) -> Any:
        if (execution := get_current()) is not None:
            execution.check_lease()
        return None if before is None else before(state)

    async def check_lease_async(state: object) -> None:
        await check_lease(state)

    return retry.copy(before=check_lease_async if is_async(before) else check_lease)
