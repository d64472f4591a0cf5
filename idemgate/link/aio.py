"""The awaiting link."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import redis.exceptions as rx
from redis.asyncio.cluster import RedisCluster

from idemgate.core.calls import Batch, Call, Moved
from idemgate.errors import StoreUnavailable
from idemgate.link.clients import SOCKET_TIMEOUT, async_client, close_client
from idemgate.link.endpoint import Endpoint
from idemgate.link.faults import FAILURES, Patience
from idemgate.link.listen import Ear
from idemgate.link.resp import pack
from idemgate.link.wire import Wire, connected

__all__ = ["AsyncLink"]

T = TypeVar("T")


class _Loop:
    """What belongs to one event loop: its client, its ear, and the calls under way."""

    __slots__ = ("blocking", "client", "connecting", "ear", "patience", "tasks", "wire")

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self.client = _undressed(async_client(endpoint, seconds))
        self.blocking: Any = None
        self.wire: Wire | None = None
        self.connecting = asyncio.Lock()
        self.patience = min(seconds, SOCKET_TIMEOUT)
        self.ear = Ear(endpoint)
        self.tasks: set[asyncio.Task[Any]] = set()

    async def connected(self) -> Wire:
        """The wire of this loop, made anew when the one before was lost; waits while the server reads too slowly."""
        if self.wire is None or self.wire.closed:
            async with self.connecting:
                if self.wire is None or self.wire.closed:
                    self.wire = await connected(self.client.connection_pool, self.patience)
        wire = self.wire
        if wire.crowded:
            await wire.room()
        return wire


class AsyncLink:
    """Carries calls and awaits. No call is ever cancelled half-way.

    To one server, the calls of one tick of an event loop travel together, over one connection (`link.wire`); to a
    cluster they go through redis-py's client, which knows the nodes.
    """

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self.endpoint = endpoint
        self.seconds = seconds
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()

    @property
    def _here(self) -> _Loop:
        loop = asyncio.get_running_loop()
        here = self._loops.get(loop)
        if here is None:
            here = self._loops[loop] = _Loop(self.endpoint, self.seconds)
        return here

    def start(self, call: Call[T], within: float | None = None) -> asyncio.Future[T]:
        """Sends a call whose future goes on when the caller is cancelled, if it is shielded: cancelling then neither
        tears a reply nor hides the outcome."""
        here = self._here
        wire = here.wire
        if wire is None or wire.closed or wire.crowded:
            return self.spawn(self._insist(call, self._patience(within)))
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        request = pack(("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args))
        patience = Patience(self.seconds if within is None else within)
        wire.ask(request, partial(self._heard, call, answer, patience, wire))
        return answer

    def _heard(self, call: Call[T], answer: asyncio.Future[T], patience: Patience, wire: Wire, reply: Any) -> None:
        """The common case costs no task; whatever is out of the ordinary goes on in one."""
        if answer.done():
            return  # nobody waits for it
        if not isinstance(reply, Exception):
            try:
                answer.set_result(call.answer(reply))
            except Moved:
                self.spawn(_into(answer, self._answered(call, reply, patience)))
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the reply is for who asked
                answer.set_exception(error)
            return
        self._suspect(wire, reply)
        self.spawn(_into(answer, self._again(call, patience, reply)))

    async def _again(self, call: Call[T], patience: Patience, error: Exception) -> T:
        if isinstance(error, rx.NoScriptError):
            try:
                reply = await self._ask("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)
                return await self._answered(call, reply, patience)
            except FAILURES as failure:
                error = failure
        await asyncio.sleep(patience.pause(error))
        return await self._insist(call, patience)

    def _suspect(self, wire: Wire, error: Exception) -> None:
        if self.endpoint.kind == "sentinel" and isinstance(error, rx.ResponseError) and "READONLY" in str(error):
            wire.abandon()  # it was the master; the next connection asks the sentinels who is now

    async def run(self, call: Call[T], within: float | None = None) -> T:
        """As `SyncLink.run`. Cancelling the caller leaves the call to finish by itself."""
        return await asyncio.shield(self.start(call, within))

    async def run_all(self, batch: Batch[T], within: float | None = None) -> T:
        """As `SyncLink.run_all`; on a cluster its calls travel side by side."""
        return batch.join(await asyncio.shield(self.spawn(self._run_together(batch.calls, self._patience(within)))))

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
                reply = await self._send(call)
            except FAILURES as error:
                pause = patience.pause(error)
            else:
                return await self._answered(call, reply, patience, hops)
            await asyncio.sleep(pause)

    async def _answered(self, call: Call[T], reply: list[Any], patience: Patience, hops: int = 0) -> T:
        """As that of `SyncLink`."""
        try:
            return call.answer(reply)
        except Moved as moved:
            elsewhere, by = call.elsewhere, moved.by
        assert elsewhere is not None, "or it is not moved"
        await asyncio.sleep(patience.hop(hops))
        there = elsewhere.there(await self._insist(elsewhere.ask(), patience), by)
        return there.join([await self._insist(one, patience, hops + 1) for one in there.calls])  # type: ignore[no-any-return]

    async def _run_together(self, calls: Sequence[Call[Any]], patience: Patience) -> list[Any]:
        if self.endpoint.kind == "cluster":
            return await self._side_by_side(calls, patience)
        replies: Sequence[Any] = [None] * len(calls)
        if len(calls) > 1:
            try:
                replies = await self._send_together(calls)
            except FAILURES as error:
                await asyncio.sleep(patience.pause(error))
        # What has no reply, or an error for one, goes again by itself, with the same tokens.
        return [
            await (self._answered(call, reply, patience) if isinstance(reply, list) else self._insist(call, patience))
            for call, reply in zip(calls, replies, strict=True)
        ]

    async def _side_by_side(self, calls: Sequence[Call[Any]], patience: Patience) -> list[Any]:
        """Calls with the same key one after the other, as the caller gave them; the others at once."""
        answers: list[Any] = [None] * len(calls)
        chains: defaultdict[bytes, list[int]] = defaultdict(list)
        for place, call in enumerate(calls):
            chains[call.keys[0]].append(place)

        async def one_by_one(places: list[int]) -> None:
            for place in places:
                answers[place] = await self._insist(calls[place], patience)

        await asyncio.gather(*map(one_by_one, chains.values()))
        return answers

    async def _send(self, call: Call[Any]) -> list[Any]:
        script, words = call.script, (len(call.keys), *call.keys, *call.args)
        try:
            return await self._ask("EVALSHA", script.sha, *words)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return await self._ask("EVAL", script.text, *words)  # type: ignore[no-any-return]

    async def _ask(self, *words: Any) -> Any:
        if self.endpoint.kind == "cluster":
            return await _asked(self._here.client, *words)
        wire = await self._here.connected()
        try:
            return await wire.send(pack(words))
        except rx.ResponseError as error:
            self._suspect(wire, error)
            raise

    async def _send_together(self, calls: Sequence[Call[Any]]) -> list[Any]:
        wire = await self._here.connected()
        requests = [pack(("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)) for call in calls]
        return await asyncio.gather(*map(wire.send, requests), return_exceptions=True)

    async def command(self, *args: Any) -> Any:
        """As `SyncLink.command`."""
        return await asyncio.shield(self.spawn(_translated(self._ask(*args))))

    async def blocking(self, *args: Any, within: float) -> Any:
        """A command that blocks on the server (XREADGROUP ... BLOCK), on a client whose reads have no time-out.

        Sent once. Cancelling it drops its connection, and so does `within`, in seconds, which should be more than the
        time it blocks: StoreUnavailable then, as when the connection is lost; else StoreRefused.
        """
        here = self._here
        if here.blocking is None:
            here.blocking = _undressed(async_client(self.endpoint, socket_timeout=None))
        try:
            async with asyncio.timeout(within):
                return await _translated(_asked(here.blocking, *args))
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

        await ear.add(channel, heard)
        try:
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
        if here is None:
            return
        if here.wire is not None:
            await here.wire.drain()
        if here.tasks:
            await asyncio.wait(here.tasks, timeout=self.seconds)
        self._loops.pop(loop, None)
        await here.ear.close()
        if here.wire is not None:
            await here.wire.close()
        await close_client(here.client)
        if here.blocking is not None:
            await close_client(here.blocking)


async def _into(answer: asyncio.Future[T], work: Coroutine[Any, Any, T]) -> None:
    """Answers a future with what comes of the work."""
    try:
        result = await work
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except BaseException as error:  # noqa: BLE001 - it is for who asked
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(result)


async def _asked(client: Any, *args: Any) -> Any:
    try:
        if isinstance(client, RedisCluster):
            # Before it knows the nodes, redis-py 7 and 8 send to any of them.
            await client.initialize()
            return await _routed(client, *args)
        return await client.execute_command(*args)
    except AttributeError as error:
        # redis-py 8 closes connections to cluster nodes, when it looks for these anew, under those who use them.
        raise rx.ConnectionError("the connection was closed while in use") from error


async def _routed(client: Any, *args: Any) -> Any:
    try:
        return await client.execute_command(*args)
    except rx.ClusterError as error:
        if args[0] not in ("EVALSHA", "EVAL") or "TTL exhausted" not in str(error):
            raise
    return await _redirected(client, *args)


async def _redirected(client: Any, *args: Any) -> Any:
    """A script whose slot is moving, asked for where its key is now. redis-py's asyncio client sends ASKING over one
    free connection and the command over the next one, so that with two of them it never arrives."""
    await client.initialize()  # connections of nodes that it gave up are closed by nobody
    try:
        return await client.get_node_from_key(args[3]).execute_command(*args)
    except rx.MovedError:
        raise
    except rx.AskError as error:
        there: Any = error
    node = client.get_node(there.host, there.port)
    if node is None:
        raise rx.ClusterDownError("the node to which the slot moves is not known yet")
    connection = node.acquire_connection()
    try:
        await connection.send_command("ASKING")
        await node.parse_response(connection, "ASKING")  # before the rest is sent: a refusal leaves no reply behind
        await connection.send_command(*args)
        return await node.parse_response(connection, args[0])
    finally:
        getattr(node, "release", node._free.append)(connection)


async def _translated(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except FAILURES as error:
        Patience(0).pause(error)
        raise


def _undressed(client: Any) -> Any:
    """Replies of stream commands as the server gives them, whatever this version of redis-py makes of them."""
    for name in ("XREADGROUP", "XPENDING", "XCLAIM", "XAUTOCLAIM"):
        client.set_response_callback(name, _as_is)
    return client


def _as_is(reply: Any, **_: Any) -> Any:
    return reply
