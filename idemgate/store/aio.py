"""The asynchronous link: sends calls to the server and retries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import redis.exceptions as rx

from idemgate.core.activity import Sampled
from idemgate.core.calls import Batch, Call, Incomplete, PerKeyCall, SlotMoved, run_plan_async
from idemgate.core.clock import monotonic
from idemgate.core.waits import finish_despite_cancel
from idemgate.errors import StoreUnavailable
from idemgate.store.cluster.aio import AsyncCluster
from idemgate.store.connection_aio import AsyncConnection, SingleServer, raise_if_error
from idemgate.store.durability import Durability
from idemgate.store.endpoint import Endpoint
from idemgate.store.plain import has_errors, join_plain
from idemgate.store.pubsub import Losses, Subscription
from idemgate.store.replication import DurabilityCheck, make_durability_check
from idemgate.store.resp import encode_call, key_of, pack_command
from idemgate.store.retry import (
    FAILURES,
    RetryBudget,
    Send,
    SendAll,
    SendPlain,
    Steps,
    resolve_reply,
    retry_call,
    run_batch,
    run_each,
    undo_is_lost,
)

__all__ = ["AsyncLink", "PendingCall"]

T = TypeVar("T")


class _LoopState:
    """The state of one event loop: its access to the store, its subscription, and its pending calls."""

    __slots__ = (
        "at_end", "closing", "loading", "loop", "losses", "reconnecting", "store", "subscription", "subscriptions",
        "tasks",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: Endpoint, seconds: float) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.store: AsyncCluster | SingleServer = (
            AsyncCluster(endpoint, seconds)
            if endpoint.kind == "cluster"
            else SingleServer(endpoint, seconds, self.note_failover)
        )
        self.losses: Losses = Losses()
        self.subscription: Subscription = Subscription(endpoint, self.losses)
        self.subscriptions: WeakSet[Subscription] = WeakSet([self.subscription])
        self.reconnecting: asyncio.TimerHandle | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.loading: dict[bytes, asyncio.Event] = {}
        self.closing: bool = False
        self.at_end: AsyncGenerator[None] | None = None

    def note_failover(self) -> None:
        """Replace the Pub/Sub connections once the last hint of a failover is a second old.

        Nothing else would tell them of it: a former primary keeps them open and may send nothing any more.
        """
        if self.reconnecting is not None:
            self.reconnecting.cancel()
        self.reconnecting = self.loop.call_later(1.0, self._reconnect)

    def _reconnect(self) -> None:
        for subscription in tuple(self.subscriptions):
            subscription.reconnect()


class PendingCall(Generic[T]):
    """A call in flight. Cancelling a task that awaits its `answer` does not stop the call.

    `outcome` then gives the result. A separate future behind a shield would do the same, at two more turns of the event
    loop.
    """

    __slots__ = (
        "_call", "_connection", "_late_outcome", "_link", "_sampled", "_started", "_state", "answer", "within"
    )  # fmt: skip

    def __init__(
        self, link: AsyncLink, state: _LoopState, call: Call[T], within: float, connection: AsyncConnection | None
    ) -> None:
        self.answer: asyncio.Future[T] = state.loop.create_future()
        self.within: float = within
        self._link = link
        self._state = state
        self._call = call
        self._connection = connection
        self._started = started = monotonic()
        self._sampled = started > link._durations.due and link._durations.begin(started)
        self._late_outcome: tuple[T | None, BaseException | None] | None = None

    def outcome(self) -> asyncio.Future[T]:
        """Return a future of the result, for cleanup after `answer` was cancelled."""
        if self.answer.cancelled():
            self.answer = self._state.loop.create_future()
            if self._late_outcome is not None:
                self._set_outcome(*self._late_outcome)
        return self.answer

    def on_reply(self, reply: Any) -> None:
        """Handle the reply. The common case costs no task; redirects, retries and partial replies run in one."""
        if self._sampled:
            self._link._durations.add(monotonic() - self._started)
        if isinstance(reply, Exception):
            assert self._connection is not None, "an error comes from a connection"
            error = self._state.store.report_error(self._connection, reply)
            self.continue_with(self._link._retry_after(self._call, self._budget(), error))
            return
        try:
            result = self._call.answer(reply)
        except (SlotMoved, Incomplete):
            self.continue_with(self._link.take_steps(resolve_reply(self._call, reply, self._budget())))
        except Exception as error:  # noqa: BLE001 - each error about the reply belongs to the caller
            self._set_outcome(None, error)
        else:
            if self.answer.cancelled():
                self._late_outcome = result, None
            else:
                self.answer.set_result(result)

    def on_plain_reply(self, reply: Any, first: list[Any] | None = None) -> None:
        """Handle the reply to plain commands. If it does not answer the call, send the script.

        Of a pair it is the second one, and `first` holds the first one.
        """
        if first is not None and isinstance(reply, rx.ResponseError) and not isinstance(first[0], Exception):
            assert self._connection is not None, "a reply comes from a connection"
            self._connection.submit(self._call.undo_plain, partial(self._on_undone, reply))
            return
        try:
            result = self._call.answer_plain(reply if first is None else (first[0], reply), self._started)
        except Exception as error:  # noqa: BLE001 - as in `on_reply`
            self._set_outcome(None, error)
            return
        if result is None:
            self._ask_script(reply if first is None else first[0])
            return
        if self._sampled:
            self._link._durations.add(monotonic() - self._started)
        if self.answer.cancelled():
            self._late_outcome = result, None
        else:
            self.answer.set_result(result)

    def _on_undone(self, refusal: rx.ResponseError, reply: Any) -> None:
        if isinstance(reply, Exception) and not isinstance(reply, rx.ResponseError):
            self._set_outcome(None, undo_is_lost(reply))
        else:
            self._ask_script(refusal)

    def _ask_script(self, reply: Any) -> None:
        """Send the call by its script, after a reply to plain commands that is no answer, or an error."""
        if isinstance(reply, Exception):
            if not isinstance(reply, rx.ResponseError):
                self.on_reply(reply)
                return
            assert self._connection is not None, "an error comes from a connection"
            self._connection.takes_plain = None
            self._state.store.report_error(self._connection, reply)
        self.continue_with(self._link.take_steps(retry_call(self._call, self._budget())))

    def _budget(self) -> RetryBudget:
        return RetryBudget(self.within, self._started)

    def continue_with(self, work: Coroutine[Any, Any, T]) -> None:
        """Run a coroutine in a task and take its result as the answer."""
        task = self._link.spawn(self._complete_with(work))
        task.add_done_callback(partial(self._end_unstarted, work))

    def _end_unstarted(self, work: Coroutine[Any, Any, T], task: asyncio.Task[None]) -> None:
        """Answer the caller if the task was cancelled before its first step."""
        work.close()
        if task.cancelled() and (self.answer.cancelled() or not self.answer.done()):
            self._end_cancelled()

    def _end_cancelled(self) -> None:
        if self._state.closing:
            self._set_outcome(None, StoreUnavailable("the gate was closed while the call was retried", "unknown"))
        else:
            self.answer.cancel()

    async def _complete_with(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            result = await work
        except asyncio.CancelledError:
            self._end_cancelled()
            if not self._state.closing:
                raise
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            self._set_outcome(None, error)
        else:
            self._set_outcome(result, None)

    def _set_outcome(self, result: T | None, error: BaseException | None) -> None:
        if self.answer.cancelled():
            self._late_outcome = result, error
        elif error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(cast(T, result))


class AsyncLink:
    """The asynchronous way to the store. Cancelling a caller never interrupts a call.

    The calls of one tick of an event loop travel together, over one connection (`store.connection_aio`). On a cluster
    they use one connection for each node (`store.cluster.aio`).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        seconds: float,
        durability: Durability | None = None,
        durations: Sampled | None = None,
    ) -> None:
        """Build a link that opens no connection yet. `durations` samples those of single calls that succeed at once."""
        self.endpoint = endpoint
        self.seconds = seconds
        self._durations = durations or Sampled()
        self._durability_check = make_durability_check(durability, endpoint, seconds)
        self._last: _LoopState | None = None
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()
        self._ended: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    @property
    def _state(self) -> _LoopState:
        loop, state = asyncio.get_running_loop(), self._last
        if state is None or state.loop is not loop:
            state = self._loops.get(loop)
            if state is None:
                self._drop_closed_loops()
                state = self._loops[loop] = _LoopState(loop, self.endpoint, self.seconds)
                self._close_at_end(state)
            self._last = state
        return state

    def start(self, call: Call[T], within: float | None = None, attempt: float | None = None) -> PendingCall[T]:
        """Send a call and return it as a `PendingCall`: `await link.start(call).answer`.

        The call goes on when the caller is cancelled. `within` and `attempt` are as in `SyncLink.run`.
        """
        state = self._last  # as `_state`, inlined for speed
        if state is None or state.loop is not asyncio.get_running_loop():
            state = self._state
        connection = state.store.ready_connection(call.keys[0])
        pending = PendingCall(self, state, call, self.seconds if within is None else within, connection)
        if (
            connection is None
            or attempt is not None
            or (self._durability_check is not None and self._durability_check.applies_to(call))
        ):
            pending.continue_with(self.take_steps(retry_call(call, RetryBudget(pending.within, attempt=attempt))))
        elif (
            connection.takes_plain is not False
            and (plain := call.plain)
            and (connection.takes_plain or connection.learn_plain(call.keys[0]))
        ):
            if call.pair:
                first: list[Any] = []
                connection.submit(plain, first.append, partial(pending.on_plain_reply, first=first))
            else:
                connection.submit(plain, pending.on_plain_reply)
        else:
            connection.submit(call.framed or encode_call(call), pending.on_reply)
        return pending

    async def _retry_after(self, call: Call[T], budget: RetryBudget, error: Exception) -> T:
        if isinstance(error, rx.NoScriptError):
            try:
                reply = await self._load(call, budget)
            except FAILURES as failure:
                error = failure
            else:
                return await self.take_steps(resolve_reply(call, reply, budget))
        await asyncio.sleep(budget.next_delay(error))
        return await self.take_steps(retry_call(call, budget))

    async def take_steps(self, steps: Steps[T]) -> T:
        """Take the steps to an answer and return it."""
        return await run_plan_async(steps, self._take_step)

    async def _take_step(self, step: Send | SendAll | SendPlain) -> Any:
        try:
            if isinstance(step, Send):
                return await self._send(step.call, step.budget)
            if isinstance(step, SendPlain):
                return await self._send_plain(step.calls, step.budget.attempt)
            return await self._pipeline(step.calls, step.budget.attempt)
        except FAILURES as error:
            return error

    async def run(self, call: Call[T], within: float | None = None, attempt: float | None = None) -> T:
        """Send one call and return its answer, as `SyncLink.run` does. Cancelling the caller does not stop the call."""
        return await self.start(call, within, attempt).answer

    async def run_all(self, batch: Batch[T], within: float | None = None) -> T:
        """Send the calls of a batch together and return its joined answer, as `SyncLink.run_all` does."""
        steps = run_batch(batch.calls, self._budget(within, None))
        return batch.join(await asyncio.shield(self.spawn(self.take_steps(steps))))

    async def run_each(
        self, calls: Sequence[PerKeyCall[Any]], within: float | None = None, attempt: float | None = None
    ) -> list[Any]:
        """Send calls together and return one outcome for each of their keys, as `SyncLink.run_each` does."""
        return await asyncio.shield(self.start_each(calls, within, attempt))

    def start_each(
        self, calls: Sequence[PerKeyCall[Any]], within: float | None = None, attempt: float | None = None
    ) -> asyncio.Task[list[Any]]:
        """Start `run_each` in a task. It goes on when the caller is cancelled."""
        return self.spawn(self.take_steps(run_each(calls, self._budget(within, attempt))))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in a task that `close` waits for."""
        try:
            tasks = self._state.tasks
        except BaseException:
            work.close()  # Python warns of a coroutine that is never awaited
            raise
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def _budget(self, within: float | None, attempt: float | None) -> RetryBudget:
        return RetryBudget(self.seconds if within is None else within, attempt=attempt)

    async def _send(self, call: Call[Any], budget: RetryBudget) -> list[Any]:
        script, check, arguments = call.script, self._durability_check, (len(call.keys), *call.keys, *call.args)
        if check is not None and check.applies_to(call):
            return await self._send_durably(check, call)
        try:
            return await self._execute("EVALSHA", script.sha, *arguments, seconds=budget.attempt)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return await self._load(call, budget)

    async def _load(self, call: Call[Any], budget: RetryBudget) -> list[Any]:
        """Send a missing script with its text and return the reply.

        Concurrent callers of the same script wait, then send its SHA-1 again. So a restarted server gets the text once,
        not once per caller. If the load failed, or went to another node, a caller sends the text again.
        """
        script, loading, arguments = call.script, self._state.loading, (len(call.keys), *call.keys, *call.args)
        while (loaded := loading.get(script.sha)) is not None:
            try:
                await asyncio.wait_for(loaded.wait(), budget.remaining)
            except TimeoutError as error:
                raise rx.TimeoutError("the script was not loaded in time") from error
            with suppress(rx.NoScriptError):
                return await self._execute("EVALSHA", script.sha, *arguments)  # type: ignore[no-any-return]
        loaded = loading[script.sha] = asyncio.Event()
        try:
            return await self._execute("EVAL", script.text, *arguments)  # type: ignore[no-any-return]
        finally:
            del loading[script.sha]
            loaded.set()

    async def _send_durably(self, check: DurabilityCheck, call: Call[Any]) -> list[Any]:
        script, arguments = call.script, (len(call.keys), *call.keys, *call.args)
        try:
            return await self._execute_durably(check, "EVALSHA", script.sha, *arguments)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return await self._execute_durably(check, "EVAL", script.text, *arguments)  # type: ignore[no-any-return]

    async def _execute(self, *arguments: Any, seconds: float | None = None) -> Any:
        return await self._state.store.execute(key_of(arguments), pack_command(arguments), seconds)

    async def _execute_durably(self, check: DurabilityCheck, *arguments: Any) -> Any:
        """Execute a command and wait for its durability. The calls of one tick share the wait.

        Raises:
            NotReplicated: the write is not as durable as required.
        """
        [reply] = await self._server.execute_durably(check, [pack_command(arguments)])
        return raise_if_error(reply)

    @property
    def _server(self) -> SingleServer:
        store = self._state.store
        assert isinstance(store, SingleServer), "durability= is not available on a cluster"
        return store

    async def _pipeline(self, calls: Sequence[Call[Any]], attempt: float | None) -> list[Any]:
        check = self._durability_check
        requests = [call.framed or encode_call(call) for call in calls]
        if check is not None and any(map(check.applies_to, calls)):
            return await self._server.execute_durably(check, requests)
        return await self._state.store.execute_all([call.keys[0] for call in calls], requests, attempt)

    async def _send_plain(self, calls: Sequence[PerKeyCall[Any]], attempt: float | None) -> list[Any] | None:
        key, store = calls[0].keys[0], self._state.store
        if self._durability_check is not None or not isinstance(store, SingleServer):
            return None
        if (connection := store.ready_connection(key)) is None:
            return None
        if not connection.takes_plain:
            if connection.takes_plain is None:
                connection.learn_plain(key)
            return None
        request, number = join_plain(calls)
        replies = await connection.send_many(request, number, attempt)
        if has_errors(replies):
            connection.takes_plain = None
            for reply in replies:
                if isinstance(reply, Exception):
                    store.report_error(connection, reply)
        return replies

    def _drop_closed_loops(self) -> None:
        """Drop the state of event loops that ended without `close`.

        The state refers to its loop, so neither it nor its connections would ever be garbage-collected.
        """
        for reference in self._loops.keyrefs():
            loop = reference()
            if loop is not None and loop.is_closed():
                self._loops.pop(loop, None)

    async def command(self, *args: Any) -> Any:
        """Execute one plain command without retries, as `SyncLink.command` does."""
        return await asyncio.shield(self.spawn(_translate_errors(self._execute(*args))))

    async def blocking(self, *args: Any, within: float) -> Any:
        """Execute a command that blocks on the server (XREADGROUP ... BLOCK), on a dedicated connection.

        The command is sent once. Cancelling the caller drops the connection.

        Args:
            args: the words of the command.
            within: seconds after which the connection is dropped. Choose more than the command blocks.

        Raises:
            StoreUnavailable: the connection was lost, or `within` has passed.
            ServerRejected: the server refused the command.
        """
        try:
            async with asyncio.timeout(within):
                return await _translate_errors(self._state.store.execute_dedicated(key_of(args), pack_command(args)))
        except TimeoutError:
            raise StoreUnavailable(f"no answer from the store within {within:g} s", "unknown") from None

    @asynccontextmanager
    async def waiting(self, channel: bytes) -> AsyncGenerator[asyncio.Event]:
        """Yield an event that is set when a message arrives on the channel, or after the subscription was restored."""
        event = asyncio.Event()
        subscription = self._state.subscription

        def on_message(_channel: bytes, _data: bytes | None) -> None:
            event.set()

        try:
            await subscription.add(channel, on_message)
            yield event
        finally:
            subscription.remove(channel, on_message)

    def subscription(self) -> Subscription:
        """Return a new Pub/Sub connection. The caller closes it."""
        subscription = Subscription(self.endpoint, self._state.losses)
        self._state.subscriptions.add(subscription)
        return subscription

    async def close(self) -> None:
        """Wait for the pending calls, then close the connections of this event loop."""
        loop = asyncio.get_running_loop()
        for _ in range(3):  # a caller that was cancelled late may open it again, but not for ever
            if (state := self._loops.get(loop)) is None:
                return
            await finish_despite_cancel(self._close_loop(state))
            if state.at_end is not None and loop not in self._ended:
                await state.at_end.aclose()

    def _close_at_end(self, state: _LoopState) -> None:
        """Close the state when its event loop ends without `close`, or after it.

        `asyncio.run` cancels all tasks once. A call that is cancelled then still has to release its claim, in a task
        that nothing else waits for. The loop closes its async generators after that.
        """
        if state.loop in self._ended:
            return
        state.at_end = self._wait_for_end(state)
        with suppress(StopIteration):
            state.at_end.__anext__().send(None)  # the loop knows a generator from its first step on

    async def _wait_for_end(self, state: _LoopState) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            if self._loops.get(state.loop) is state:
                self._ended.add(state.loop)
                await self.close()

    async def _finish_tasks(self, state: _LoopState) -> None:
        """Wait for the pending calls and for those that follow them, such as the release of a cancelled claim.

        After the timeout of the gate the rest is cancelled: a call that goes on would open another connection.
        """
        end = monotonic() + self.seconds
        while state.tasks and (left := end - monotonic()) > 0:
            await asyncio.wait(tuple(state.tasks), timeout=left)
            await asyncio.sleep(0)  # a caller that got its answer may start the next call
        state.closing = True
        for _ in range(3):  # a caller that gets the error may start another call, but not for ever
            if tasks := tuple(state.tasks):
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await asyncio.sleep(0)

    async def _close_loop(self, state: _LoopState) -> None:
        await state.store.drain()
        await self._finish_tasks(state)
        self._loops.pop(state.loop, None)
        self._last = None
        if state.reconnecting is not None:
            state.reconnecting.cancel()
        await state.subscription.close()
        await state.store.close()


async def _translate_errors(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except FAILURES as error:
        RetryBudget(0).next_delay(error)
        raise
