"""The async form of a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from idemgate.core.calls import run_plan_async
from idemgate.core.durations import Duration
from idemgate.core.keys import Key
from idemgate.core.validation import check_function
from idemgate.dedup.dedup import AioDedup, Dedup
from idemgate.guard.batch import AioClaimBatch, build_completions, build_releases, record_ends, run_ends_async
from idemgate.guard.claim import AioClaim, BaseClaim, claim_request, claim_requests
from idemgate.guard.claim_calls import Record
from idemgate.guard.keep import Keep
from idemgate.guard.manage import cancel, forget, inspect, join_marks, mark_call, mark_calls, resolve
from idemgate.guard.options import ClaimOptions
from idemgate.history.trace import EventTraces, trace_event
from idemgate.store.context import Context
from idemgate.topics.policy import TopicOptions
from idemgate.topics.registry import StoredTopic, stored_topics
from idemgate.topics.topic import AioTopic, Topic

if TYPE_CHECKING:
    from idemgate.membership.member import Membership
    from idemgate.subscribers import Subscriber, Subscribers
    from idemgate.worker.drain import Drained
    from idemgate.worker.worker import Worker

__all__ = ["AioGate"]


class AioGate:
    """The async form of a gate, `gate.aio`. Each method is documented at `Gate`."""

    def __init__(
        self,
        context: Context,
        topic: Callable[..., Topic],
        topics: dict[str, Topic],
        subscribers: list[Subscriber],
    ) -> None:
        self.context = context
        self._topic = topic
        self._topics = topics
        self._subscribers = subscribers

    def __reduce__(self) -> Any:
        """Let pickle store the gate; see `Gate`."""
        return getattr, (cast(Any, self._topic).__self__, "aio")

    def claim(self, key: Key, *, fingerprint: object | None = None, **options: Unpack[ClaimOptions]) -> AioClaim:
        """Claim a key; see `Gate.claim`. `await` it, or use it in `async with`."""
        return AioClaim(self.context, claim_request(self.context, key, fingerprint, options))

    def claim_many(
        self,
        keys: Iterable[Key],
        *,
        fingerprints: Iterable[object] | None = None,
        keep: Keep | None = None,
        **options: Unpack[ClaimOptions],
    ) -> AioClaimBatch:
        """Claim many keys; see `Gate.claim_many`. `await` it, or use it in `async with`. `keep` may be async."""
        if keep is not None:
            check_function(keep, "keep")
        requests = claim_requests(self.context, keys, fingerprints, options)
        return AioClaimBatch(self.context, [AioClaim(self.context, request) for request in requests], keep)

    async def complete_many(
        self, pairs: Iterable[tuple[BaseClaim, object]], *, retention: Duration | None = None
    ) -> list[bool]:
        """Complete many claims; see `Gate.complete_many`."""
        claims, calls = build_completions(self.context, pairs, retention)
        return record_ends(claims, await run_ends_async(self.context, claims, calls, completes=True))

    async def release_many(self, claims: Iterable[BaseClaim]) -> list[bool]:
        """Release many claims; see `Gate.release_many`."""
        held, calls = build_releases(self.context, claims)
        return record_ends(held, await run_ends_async(self.context, held, calls, completes=False))

    async def first(self, key: Key, retention: Duration, *, scope: str = "first") -> bool:
        """Mark a key; see `Gate.first`."""
        return await self.context.aio_link.run(mark_call(self.context, key, retention, scope))

    async def first_many(self, keys: Iterable[Key], retention: Duration, *, scope: str = "first") -> list[bool]:
        """Mark many keys; see `Gate.first_many`."""
        records, calls = mark_calls(self.context, keys, retention, scope)
        return join_marks(records, await self.context.aio_link.run_each(calls))

    def dedup(self, scope: str, retention: Duration) -> AioDedup:
        """Return the compact set of ids of a scope; see `Gate.dedup`."""
        return Dedup(self.context, scope, retention).aio

    async def inspect(self, key: Key, *, scope: str = "claim") -> Record:
        """Return the stored record of a key; see `Gate.inspect`."""
        return await run_plan_async(inspect(self.context, key, scope), self.context.aio_link.run_all)

    async def cancel(self, key: Key, *, scope: str = "claim") -> bool:
        """Ask the owner of a key to stop; see `Gate.cancel`."""
        return await run_plan_async(cancel(self.context, key, scope), self.context.aio_link.run_all)

    async def forget(self, key: Key, *, scope: str = "claim", force: bool = False) -> bool:
        """Delete the record of a key; see `Gate.forget`."""
        return await run_plan_async(forget(self.context, key, scope, force), self.context.aio_link.run_all)

    async def resolve(
        self, key: Key, *, done: bool, result: object = None, retention: Duration | None = None, scope: str = "claim"
    ) -> bool:
        """Decide the state of a key whose owner lost its lease; see `Gate.resolve`."""
        return await run_plan_async(
            resolve(self.context, key, scope, done, result, retention), self.context.aio_link.run_all
        )

    def topic(self, name: str, **options: Unpack[TopicOptions]) -> AioTopic:
        """Return the async form of a topic; see `Gate.topic`."""
        return self._topic(name, **options).aio

    async def stored_topics(self, *, active: bool = False) -> list[StoredTopic]:
        """Return every topic that the store holds; see `Gate.stored_topics`."""
        return await run_plan_async(stored_topics(self.context, active), self.context.aio_link.run_all)

    async def trace(self, event_id: Key, *, topic: str | None = None, key: Key | None = None) -> EventTraces:
        """Return what became of the triggers with an event id; see `Gate.trace`."""
        return await run_plan_async(trace_event(self.context, event_id, topic, key), self.context.aio_link.run_all)

    def worker(
        self,
        *topics: str,
        concurrency: int = 32,
        prefetch: int | None = None,
        grace: Duration = "30s",
        membership: Literal["redis"] | Membership | None = None,
    ) -> Worker:
        """Return a worker for use inside an application: `async with gate.aio.worker(): ...`; see `Worker`."""
        from idemgate.worker.worker import Worker

        return Worker(self, topics, concurrency=concurrency, prefetch=prefetch, grace=grace, membership=membership)

    @property
    def topics(self) -> dict[str, Topic]:
        """The topics of the gate, by name."""
        return self._topics

    def subscribers(self, *, grace: Duration = "30s") -> Subscribers:
        """Return the gate's subscribers for use inside an application: `async with gate.aio.subscribers(): ...`."""
        from idemgate.subscribers import Subscribers

        return Subscribers(self._subscribers, grace, self.context)

    async def drain(self, *, limit: int = 10_000) -> Drained:
        """Run all handlers and subscribers until nothing is due and return what ran. For tests; no worker is needed.

        Everything runs as in a worker, with its retries, guards and dead letters, but one handler at a time. It never
        waits: a message that is due later stays. Move the clock of the gate (`idemgate.testing.Clock`), and drain
        again. `idemgate.testing.drain(gate)` blocks.

        It sends the rows of outboxes (`inbox.relay`), reads the streams and lists of the gate, and enqueues recurring
        triggers that are due next. It leaves out channels of Pub/Sub, which store nothing, the listener of expiring
        keys, and subscribers without `drain_once`: `Drained.skipped` names them. It also names a topic without a
        handler that has due messages: was the module with the handler imported? An entry of a stream that failed
        returns by the time of the server, which no clock moves. A topic that is paused, or whose downstream service is
        away, keeps its messages.

        Args:
            limit: the most deliveries of a topic, or entries of a subscriber.

        Raises:
            NotDrained: a topic or a subscriber had more. Does its handler trigger the topic itself?
            PolicyChanged: a stored policy differs.
            StoreError: the store did not answer.
        """
        from idemgate.worker.drain import drain

        return await drain(self.context, self._topics, self._subscribers, limit)

    async def close(self) -> None:
        """Wait for the running calls, then close the connections of this event loop.

        It waits for the timeout of the gate at most. Then calls that are still retried end with StoreUnavailable. Await
        the tasks that use the gate before, also the cancelled ones: a later call connects again.
        """
        await self.context.close_aio()
