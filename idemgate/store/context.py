"""What every part of one gate shares: its namespace, its limits, and its ways to the store."""

from __future__ import annotations

import os
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from idemgate.core.clock import Clock
from idemgate.core.codec import Codec
from idemgate.core.counters import Counters
from idemgate.core.forks import freed_at_fork
from idemgate.errors import NotConfigured
from idemgate.store.durability import Durability
from idemgate.store.heartbeat import Pulse

if TYPE_CHECKING:
    from idemgate.store.aio import AsyncLink
    from idemgate.store.endpoint import Endpoint
    from idemgate.store.sync import SyncLink

__all__ = ["Cache", "Context", "HasContext"]

MAX_BATCH = 100
"""Records of one script call. It blocks the server until it has gone through all of them."""


class Cache(Protocol):
    """A cache of what is known about records."""

    def drop(self, record: bytes) -> None:
        """Remove the record from the cache."""
        ...


class Context:
    """The shared state of one gate. Making one connects to nothing; the first use of a link does.

    `timeout` is in seconds. `counters` count in this process. `heartbeat` renews leases. `caches` are told about every
    key that is forgotten or resolved through this gate.
    """

    def __init__(
        self,
        source: Endpoint | str | None,
        namespace: str,
        timeout: float,
        max_bytes: int,
        durability: Durability | None,
        connections: int,
        clock: Clock | None,
    ) -> None:
        self.source = source
        self.namespace = namespace
        self.timeout = timeout
        self.durability = durability
        self.connections = connections
        self.clock = clock
        self.codec = Codec(max_bytes)
        self.counters = Counters()
        self.caches: WeakSet[Cache] = WeakSet()
        self.heartbeat = Pulse(self._heartbeat_link)
        self._lock = freed_at_fork(self, "_lock")
        self._link: SyncLink | None = None
        self._aio_link: AsyncLink | None = None

    @cached_property
    def endpoint(self) -> Endpoint:
        """Where the store is. Starts the embedded server if the URL asks for one. Raises NotConfigured."""
        source = self.source if self.source is not None else os.environ.get("IDEMGATE_URL")
        if source is None or source == "":
            raise NotConfigured(
                "no store was named. Pass a URL, Gate('redis://localhost:6379/0'); or set IDEMGATE_URL; "
                "or pass client=; or Gate('embedded://') for a server of this process"
            )
        if not isinstance(source, str):
            return source
        if source.startswith("embedded:"):
            from idemgate.store.embedded.server import shared

            source = shared(source).url
        from idemgate.store.url import of_url

        return of_url(source)

    @property
    def batch_size(self) -> int:
        """How many records one script call may have: 1 on a cluster, where each record has a hash slot of its own."""
        return 1 if self.endpoint.kind == "cluster" else MAX_BATCH

    @property
    def link(self) -> SyncLink:
        """The blocking link: `context.link.run(call)`."""
        if self._link is None:
            from idemgate.store.sync import SyncLink

            with self._lock:
                self._link = self._link or SyncLink(self.endpoint, self.timeout, self.durability)
        return self._link

    @property
    def aio_link(self) -> AsyncLink:
        """The awaiting link: `await context.aio_link.run(call)`."""
        if self._aio_link is None:
            from idemgate.store.aio import AsyncLink

            self._aio_link = AsyncLink(self.endpoint, self.timeout, self.durability, self.connections)
        return self._aio_link

    def _heartbeat_link(self) -> SyncLink:
        from idemgate.store.sync import SyncLink

        return SyncLink(self.endpoint, seconds=1.0)

    def now(self) -> float:
        """Return the seconds of the test clock, or of a monotonic one."""
        return monotonic() if self.clock is None else self.clock.microseconds() / 1_000_000

    def close(self) -> None:
        """End the heartbeat thread and the blocking connections."""
        self.heartbeat.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    async def close_aio(self) -> None:
        """Wait for the calls under way, then close the connections of this event loop."""
        if self._aio_link is not None:
            await self._aio_link.close()


class HasContext(Protocol):
    """A gate, as far as the packages below it know one."""

    @property
    def context(self) -> Context: ...
