"""The awaiting link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import redis.exceptions as rx

from idemgate.core.calls import OF_ONE_KEY, Batch, Call, Each, Moved, Unfinished
from idemgate.errors import StoreError, StoreUnavailable
from idemgate.store.cluster.aio import ClusterLines
from idemgate.store.cluster.topology import key_of
from idemgate.store.connection_aio import Wire
from idemgate.store.durability import Durability
from idemgate.store.endpoint import Endpoint
from idemgate.store.pubsub import Ear
from idemgate.store.reconnecting import OneLine, raised
from idemgate.store.replication import Copies, copies_of
from idemgate.store.resp import pack, request
from idemgate.store.retry import FAILURES, Patience, unheard
from idemgate.store.shielded import to_the_end

__all__ = ["Asking", "AsyncLink"]

T = TypeVar("T")


class _Loop:
    """What belongs to one event loop: its way to the store, its ear, and the calls under way."""

    __slots__ = ("ear", "lines", "loading", "loop", "tasks")

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: Endpoint, seconds: float, connections: int) -> None:
        self.loop = loop
        self.lines = (ClusterLines if endpoint.kind == "cluster" else OneLine)(endpoint, seconds, connections)
        self.ear = Ear(endpoint)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.loading: dict[bytes, asyncio.Event] = {}


class Asking(Generic[T]):
    """A call under way. Who awaits its `answer` may be cancelled: the call goes on, and `outcome` is what comes of it.

    A future of its own would be shielded for the same, at the price of two more turns of the event loop.
    """

    __slots__ = ("_call", "_here", "_late", "_link", "_started", "_wire", "answer", "within")

    def __init__(self, link: AsyncLink, here: _Loop, call: Call[T], within: float, wire: Wire | None) -> None:
        self.answer: asyncio.Future[T] = here.loop.create_future()
        self.within = within
        self._link = link
        self._here = here
        self._call = call
        self._wire = wire
        self._started = monotonic()
        self._late: tuple[T | None, BaseException | None] | None = None

    def outcome(self) -> asyncio.Future[T]:
        """What comes of the call, for who goes on after the `answer` was cancelled."""
        if self.answer.cancelled():
            self.answer = self._here.loop.create_future()
            if self._late is not None:
                self._tell(*self._late)
        return self.answer

    def heard(self, reply: Any) -> None:
        """The common case costs no task; whatever is out of the ordinary goes on in one."""
        if isinstance(reply, Exception):
            assert self._wire is not None, "or nothing was asked on it"
            self._here.lines.suspect(self._wire, reply)
            self.go_on(self._link._again(self._call, self._patience(), reply))
            return
        try:
            result = self._call.answer(reply)
        except (Moved, Unfinished):
            self.go_on(self._link._answered(self._call, reply, self._patience()))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the reply is for who asked
            self._tell(None, error)
        else:
            if self.answer.cancelled():
                self._late = result, None
            else:
                self.answer.set_result(result)

    def _patience(self) -> Patience:
        return Patience(self.within, self._started)

    def go_on(self, work: Coroutine[Any, Any, T]) -> None:
        """The answer is what comes of this."""
        self._link.spawn(self._worked(work))

    async def _worked(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            result = await work
        except asyncio.CancelledError:
            self.answer.cancel()
            raise
        except BaseException as error:  # noqa: BLE001 - it is for who asked
            self._tell(None, error)
        else:
            self._tell(result, None)

    def _tell(self, result: T | None, error: BaseException | None) -> None:
        if self.answer.cancelled():
            self._late = result, error
        elif error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(cast(T, result))


class AsyncLink:
    """Carries calls and awaits. No call is ever cancelled half-way.

    The calls of one tick of an event loop travel together, over one connection (`link.wire`); to a cluster over one to
    each node (`link.cluster_aio`). With more `connections` they are spread over so many (`link.line`).
    """

    def __init__(
        self, endpoint: Endpoint, seconds: float, durability: Durability | None = None, connections: int = 1
    ) -> None:
        self.endpoint = endpoint
        self.seconds = seconds
        self._connections = connections
        self._copies = copies_of(durability, endpoint, seconds)
        self._last: _Loop | None = None
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()

    @property
    def _here(self) -> _Loop:
        loop, here = asyncio.get_running_loop(), self._last
        if here is None or here.loop is not loop:
            here = self._loops.get(loop)
            if here is None:
                self._leave_ended()
                here = self._loops[loop] = _Loop(loop, self.endpoint, self.seconds, self._connections)
            self._last = here
        return here

    def start(self, call: Call[T], within: float | None = None, attempt: float | None = None) -> Asking[T]:
        """Sends a call, which goes on whatever becomes of who asked: `await link.start(call).answer`. `within` and
        `attempt` are as in `SyncLink.run`."""
        here = self._here
        wire = here.lines.at_hand(call.keys[0])
        asking = Asking(self, here, call, self.seconds if within is None else within, wire)
        if wire is None or attempt is not None or (self._copies is not None and self._copies.concern(call)):
            asking.go_on(self._insist(call, Patience(asking.within, attempt=attempt)))
        else:
            wire.ask(call.framed or request(call), asking.heard)
        return asking

    async def _again(self, call: Call[T], patience: Patience, error: Exception) -> T:
        if isinstance(error, rx.NoScriptError):
            try:
                return await self._answered(call, await self._load(call, patience), patience)
            except FAILURES as failure:
                error = failure
        await asyncio.sleep(patience.pause(error))
        return await self._insist(call, patience)

    async def run(self, call: Call[T], within: float | None = None, attempt: float | None = None) -> T:
        """As `SyncLink.run`. Cancelling the caller leaves the call to finish by itself."""
        return await self.start(call, within, attempt).answer

    async def run_all(self, batch: Batch[T], within: float | None = None) -> T:
        """As `SyncLink.run_all`."""
        return batch.join(await asyncio.shield(self.spawn(self._run_together(batch.calls, self._patience(within)))))

    async def run_each(self, calls: Sequence[Each[Any]], within: float | None = None) -> list[Any]:
        """As `SyncLink.run_each`."""
        return await asyncio.shield(self.start_each(calls, within))

    def start_each(self, calls: Sequence[Each[Any]], within: float | None = None) -> asyncio.Task[list[Any]]:
        """Sends calls, which go on whatever becomes of who asked; its result is that of `run_each`."""
        return self.spawn(self._run_each(calls, self._patience(within)))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        try:
            tasks = self._here.tasks
        except BaseException:
            work.close()  # or Python complains that nobody awaited it
            raise
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def _patience(self, within: float | None) -> Patience:
        return Patience(self.seconds if within is None else within)

    async def _insist(self, call: Call[T], patience: Patience, hops: int = 0) -> T:
        while True:
            try:
                reply = await self._send(call, patience)
            except FAILURES as error:
                pause = patience.pause(error)
            else:
                return await self._answered(call, reply, patience, hops)
            await asyncio.sleep(pause)

    async def _answered(self, call: Call[T], reply: list[Any], patience: Patience, hops: int = 0) -> T:
        """As that of `SyncLink`."""
        try:
            return call.answer(reply)
        except Unfinished as found:
            rest = found.rest
            return rest.join([await self._insist(one, patience.anew()) for one in rest.calls])  # type: ignore[no-any-return]
        except Moved as moved:
            elsewhere, by = call.elsewhere, moved.by
        assert elsewhere is not None, "or it is not moved"
        await asyncio.sleep(patience.hop(hops))
        there = elsewhere.there(await self._insist(elsewhere.ask(), patience), by)
        return there.join([await self._insist(one, patience, hops + 1) for one in there.calls])  # type: ignore[no-any-return]

    async def _run_each(self, calls: Sequence[Each[Any]], patience: Patience) -> list[Any]:
        down, outcomes = None, list[Any]()
        try:
            replies = await self._sent_together(calls, patience)
        except StoreError as error:
            return [error for call in calls for _ in call.keys]
        for call, reply in zip(calls, replies, strict=True):
            if down is not None and unheard(reply):
                outcomes += [down] * len(call.keys)
                continue
            try:
                answers: list[Any] = await self._told(call, reply, patience)
                outcomes += answers
            except StoreError as error:
                outcomes += [error] * len(call.keys)
                down = down if isinstance(error, OF_ONE_KEY) else error
        return outcomes

    async def _run_together(self, calls: Sequence[Call[Any]], patience: Patience) -> list[Any]:
        replies, answers = await self._sent_together(calls, patience), list[Any]()
        for call, reply in zip(calls, replies, strict=True):
            answers.append(await self._told(call, reply, patience))
            patience.partly()
        return answers

    async def _sent_together(self, calls: Sequence[Call[Any]], patience: Patience) -> Sequence[Any]:
        replies: Sequence[Any] = [None] * len(calls)
        if len(calls) > 1:
            try:
                replies = await self._send_together(calls)
                if not all(map(unheard, replies)):
                    patience.partly()
                patience.mind(replies)
            except FAILURES as error:
                await asyncio.sleep(patience.pause(error))
        return replies

    async def _told(self, call: Call[T], reply: Any, patience: Patience) -> T:
        """What has no reply, or an error for one, goes again by itself, with the same tokens."""
        return await (self._insist(call, patience) if unheard(reply) else self._answered(call, reply, patience))

    async def _send(self, call: Call[Any], patience: Patience) -> list[Any]:
        script, copies, words = call.script, self._copies, (len(call.keys), *call.keys, *call.args)
        if copies is not None and copies.concern(call):
            return await self._send_durably(copies, call)
        try:
            return await self._ask("EVALSHA", script.sha, *words, seconds=patience.attempt)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return await self._load(call, patience)

    async def _load(self, call: Call[Any], patience: Patience) -> list[Any]:
        """Brings the script along; who needs the same one meanwhile waits for that and names it again: a server that
        was restarted is not sent it by all who call. One that did not get there, or to this node, is sent once more."""
        script, loading, words = call.script, self._here.loading, (len(call.keys), *call.keys, *call.args)
        while (brought := loading.get(script.sha)) is not None:
            try:
                await asyncio.wait_for(brought.wait(), patience.left)
            except TimeoutError as error:
                raise rx.TimeoutError("the script is on its way since long") from error
            with suppress(rx.NoScriptError):
                return await self._ask("EVALSHA", script.sha, *words)  # type: ignore[no-any-return]
        brought = loading[script.sha] = asyncio.Event()
        try:
            return await self._ask("EVAL", script.text, *words)  # type: ignore[no-any-return]
        finally:
            del loading[script.sha]
            brought.set()

    async def _send_durably(self, copies: Copies, call: Call[Any]) -> list[Any]:
        script, words = call.script, (len(call.keys), *call.keys, *call.args)
        try:
            return await self._ask_durably(copies, "EVALSHA", script.sha, *words)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return await self._ask_durably(copies, "EVAL", script.text, *words)  # type: ignore[no-any-return]

    async def _ask(self, *words: Any, seconds: float | None = None) -> Any:
        return await self._here.lines.ask(key_of(words), pack(words), seconds)

    async def _ask_durably(self, copies: Copies, *words: Any) -> Any:
        """As `_ask`; Short when the write is on fewer copies than asked for. The calls of a tick wait for them
        together."""
        [reply] = await self._line.ask_durably(copies, [pack(words)])
        return raised(reply)

    @property
    def _line(self) -> OneLine:
        lines = self._here.lines
        assert isinstance(lines, OneLine), "a cluster has no copies to wait for"
        return lines

    async def _send_together(self, calls: Sequence[Call[Any]]) -> list[Any]:
        copies = self._copies
        requests = [call.framed or request(call) for call in calls]
        if copies is not None and any(map(copies.concern, calls)):
            return await self._line.ask_durably(copies, requests)
        return await self._here.lines.ask_all([call.keys[0] for call in calls], requests)

    def _leave_ended(self) -> None:
        """Lets go of what belongs to loops that ended without `close`: it holds its loop, so that neither would ever go
        by itself, nor the connections of either."""
        for known in self._loops.keyrefs():
            loop = known()
            if loop is not None and loop.is_closed():
                self._loops.pop(loop, None)

    async def command(self, *args: Any) -> Any:
        """As `SyncLink.command`."""
        return await asyncio.shield(self.spawn(_translated(self._ask(*args))))

    async def blocking(self, *args: Any, within: float) -> Any:
        """A command that blocks on the server (XREADGROUP ... BLOCK), on a connection of its own.

        Sent once. Cancelling it drops its connection, and so does `within`, in seconds, which should be more than the
        time it blocks: StoreUnavailable then, as when the connection is lost; else ServerRejected.
        """
        try:
            async with asyncio.timeout(within):
                return await _translated(self._here.lines.ask_apart(key_of(args), pack(args)))
        except TimeoutError:
            raise StoreUnavailable(f"no answer from the store within {within:g} s", "unknown") from None

    @asynccontextmanager
    async def waiting(self, channel: bytes) -> AsyncGenerator[asyncio.Event]:
        """An event that is set when something is published on the channel, or when the subscription had to be made
        anew."""
        event = asyncio.Event()
        ear = self._here.ear

        def heard(_channel: bytes, _data: bytes | None) -> None:
            event.set()

        try:
            await ear.add(channel, heard)
            yield event
        finally:
            ear.remove(channel, heard)

    def ear(self) -> Ear:
        """A Pub/Sub connection of its own, for a subscriber; the caller closes it."""
        return Ear(self.endpoint)

    async def close(self) -> None:
        """Waits for the calls under way, then closes this event loop's connections."""
        loop = asyncio.get_running_loop()
        here = self._loops.get(loop)
        if here is not None:
            await to_the_end(self._leave(here))

    async def _leave(self, here: _Loop) -> None:
        await here.lines.drain()
        if here.tasks:
            await asyncio.wait(here.tasks, timeout=self.seconds)
        self._loops.pop(here.loop, None)
        self._last = None
        await here.ear.close()
        await here.lines.close()


async def _translated(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except FAILURES as error:
        Patience(0).pause(error)
        raise
