"""The blocking link: sends calls to the server and retries them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import redis.exceptions as rx

from idemgate.core.activity import Sampled
from idemgate.core.backoff import SOCKET_TIMEOUT, retry_pause
from idemgate.core.calls import Batch, Call, Incomplete, PerKeyCall, SlotMoved, run_plan
from idemgate.core.clock import monotonic
from idemgate.core.forks import lock_reset_at_fork
from idemgate.store.clients import sync_client, sync_pool
from idemgate.store.cluster.sync import SyncCluster
from idemgate.store.connection import ConnectionPool
from idemgate.store.durability import Durability
from idemgate.store.endpoint import Endpoint, pick_node
from idemgate.store.plain import has_errors, join_plain
from idemgate.store.replication import DurabilityCheck, make_durability_check
from idemgate.store.resp import encode_call, key_of, pack_command
from idemgate.store.retry import (
    FAILURES,
    RetryBudget,
    Send,
    SendAll,
    SendPlain,
    explain_redirect,
    needs_retry,
    retry_call,
    retry_or_resolve,
    run_batch,
    run_each,
    undo_is_lost,
)

__all__ = ["SyncLink", "Waiter"]

T = TypeVar("T")
log: logging.Logger = logging.getLogger("idemgate.store")
_has_warned = False


def warn_in_event_loop() -> None:
    """Warn once in this process if the thread runs an event loop. It stands still until a blocking call returns.

    The usual call does not ask. Those that open the connections, are sampled or have to wait do.
    """
    global _has_warned  # noqa: PLW0603 - once in a process
    events = sys.modules.get("asyncio.events")  # to import it takes longer than many programs run
    if not _has_warned and events is not None and events._get_running_loop() is not None:
        _has_warned = True
        log.warning(
            "store.blocks_event_loop: a blocking call was made in an event loop, which stands still until the store "
            "answers. Await the same method of `.aio`, or call it in asyncio.to_thread"
        )


def _undo_refused(pool: ConnectionPool, call: Call[Any], reply: Any) -> None:
    """Take back the first command of a pair whose second one was refused. Use scripts until it is asked again."""
    if call.pair and isinstance(reply[1], Exception):
        pool.takes_plain = None
        try:
            pool.execute(call.undo_plain)
        except rx.ResponseError:  # refused, too: it will not arrive later
            pass
        except FAILURES as error:
            raise undo_is_lost(error) from error


class SyncLink:
    """The blocking way to the store. Safe to share between threads; a forked child opens its own connections."""

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
        self._pool: ConnectionPool | None = None
        self._cluster = SyncCluster(endpoint, seconds) if endpoint.kind == "cluster" else None
        self._lock = lock_reset_at_fork(self, "_lock")

    def _execute(self, *arguments: Any, seconds: float | None = None) -> Any:
        """Send one command and return its reply. Errors are those of redis-py.

        `seconds` bounds the wait for the reply.
        """
        if self._cluster is not None:
            return self._cluster.execute(key_of(arguments), pack_command(arguments), seconds)
        pool = self._pool or self._open_pool()
        try:
            return pool.execute(pack_command(arguments), seconds=seconds)
        except rx.ResponseError as error:
            if (explained := explain_redirect(error)) is error:
                raise
            raise explained from error

    def _execute_durably(self, check: DurabilityCheck, *arguments: Any) -> Any:
        """Execute a command and wait for its durability.

        Raises:
            NotReplicated: the write is not as durable as required.
        """
        pool = self._pool or self._open_pool()
        self._probe(pool, check)
        reply, *waited = pool.execute_all([pack_command(arguments), *check.requests])
        if isinstance(reply, Exception):
            raise explain_redirect(reply)
        check.check_replies(waited)
        return reply

    def _probe(self, pool: ConnectionPool, check: DurabilityCheck) -> None:
        """Check once that the server supports the required durability.

        Raises:
            ServerRejected: the server does not support it.
        """
        for command in check.probe:
            (reply,) = pool.execute_all([command])
            check.check_probe(command, reply)

    def _open_pool(self) -> ConnectionPool:
        with self._lock:  # two threads must not open two pools
            if self._pool is None:
                warn_in_event_loop()
                pool = sync_pool(self.endpoint, self.seconds)
                self._pool = ConnectionPool(pool, min(self.seconds, SOCKET_TIMEOUT), self.seconds)
            return self._pool

    def run(self, call: Call[T], within: float | None = None, attempt: float | None = None) -> T:
        """Send one call and return its answer. Retries carry the same ids.

        Args:
            call: the script call.
            within: the seconds until the deadline of all tries. None: the timeout of the gate.
            attempt: the seconds that one try waits for its reply. None: the timeout of the connection. With
                `durability=` it is not used, because the reply comes after the wait for replicas.

        Raises:
            StoreUnavailable: no reply before the deadline. `executed` is "no" or "unknown".
            ServerRejected: the server refused the call for good.
            UnexpectedData: the key holds other data.
        """
        started, pool = monotonic(), self._pool
        try:
            if pool is None or attempt is not None or self._durability_check is not None:
                return call.answer(self._send_first(call, within, attempt, started))
            sampled = started > self._durations.due and self._durations.begin(started)
            if (
                pool.takes_plain is not False
                and (plain := call.plain)
                and (pool.takes_plain or pool.learn_plain(call.keys[0]))
            ):
                try:
                    reply = pool.execute(plain, started, None, call.pair)
                    if (answer := call.answer_plain(reply, started)) is not None:
                        if sampled:
                            self._add_sample(started)
                        return answer
                    _undo_refused(pool, call, reply)
                except rx.ResponseError:  # the script gets an error that can be explained, or none
                    pool.takes_plain = None
            try:  # inlined `_send`: every guarded call comes here
                reply = pool.execute(call.framed or encode_call(call), started)
            except rx.ResponseError as error:
                reply = self._load_script(error, call)
            if sampled:
                self._add_sample(started)
            return call.answer(reply)
        except (SlotMoved, Incomplete):  # `retry_call` sends it again and handles the reply
            budget = self._budget(within, attempt, started)
        except FAILURES as error:
            budget = self._budget(within, attempt, started)
            warn_in_event_loop()
            time.sleep(budget.next_delay(error))
        return run_plan(retry_call(call, budget), self._take_step)

    def _take_step(self, step: Send | SendAll | SendPlain) -> Any:
        try:
            if isinstance(step, Send):
                return self._send(step.call, step.budget.attempt)
            if isinstance(step, SendPlain):
                return self._send_plain(step.calls, step.budget.attempt)
            return self._pipeline(step.calls, step.budget.attempt)
        except FAILURES as error:
            warn_in_event_loop()
            return error

    def run_all(self, batch: Batch[T], within: float | None = None) -> T:
        """Send the calls of a batch together and return its joined answer.

        Args:
            batch: the calls. They take one round trip. On a cluster they take one for each node, in parallel.
            within: the seconds until the deadline of the whole batch. None: the timeout of the gate.

        Raises:
            StoreUnavailable: a call got no reply before the deadline.
            ServerRejected: the server refused a call for good.
            UnexpectedData: a key holds other data.
        """
        return batch.join(run_plan(run_batch(batch.calls, self._budget(within, None)), self._take_step))

    def run_each(
        self, calls: Sequence[PerKeyCall[Any]], within: float | None = None, attempt: float | None = None
    ) -> list[Any]:
        """Send calls together and return one outcome for each of their keys: an answer, or a StoreError as a value.

        After an error about the whole store, calls without a reply are not retried: they get the same error. `within`
        and `attempt` as for `run_all`.
        """
        return run_plan(run_each(calls, self._budget(within, attempt)), self._take_step)

    def try_each(self, batches: Sequence[Batch[None]], attempt: float) -> list[Exception | None]:
        """Send the calls of batches together and join the answers of each. A batch that fails does not affect others.

        Args:
            batches: the batches. They are sent once: the caller retries.
            attempt: the most seconds that the try waits for replies.

        Returns:
            One error for each batch. None if it succeeded.
        """
        calls = [call for batch in batches for call in batch.calls]
        try:
            replies = self._pipeline(calls, attempt) if calls else []
        except FAILURES as error:
            replies = [error] * len(calls)
        left = iter(replies)
        return [self._join_once(batch, [next(left) for _ in batch.calls], attempt) for batch in batches]

    def _join_once(self, batch: Batch[None], replies: list[Any], attempt: float) -> Exception | None:
        """Join the answers in the replies to a batch. Return the error if that fails."""
        try:
            answers: list[Any] = []
            for call, reply in zip(batch.calls, replies, strict=True):
                if needs_retry(reply) and not isinstance(reply, rx.NoScriptError):
                    RetryBudget(0).next_delay(reply if self._cluster else explain_redirect(reply))  # raises
                steps = retry_or_resolve(call, reply, RetryBudget(attempt, attempt=attempt))
                answers.append(run_plan(steps, self._take_step))
            batch.join(answers)
        except Exception as error:  # noqa: BLE001 - it concerns this batch only
            return error
        return None

    def _send_first(self, call: Call[Any], within: float | None, attempt: float | None, started: float) -> list[Any]:
        """Send a call for which `run` is too short. Those of a cluster come here, so they are sampled here."""
        sampled = self._cluster is not None and attempt is None and self._durations.begin(started)
        reply = self._send(call, self._budget(within, attempt, started).attempt)
        if sampled:
            self._add_sample(started)
        return reply

    def _add_sample(self, started: float) -> None:
        self._durations.add(monotonic() - started)
        warn_in_event_loop()  # the connections may have been opened where no event loop ran

    def _send(self, call: Call[Any], attempt: float | None = None) -> list[Any]:
        check = self._durability_check
        if check is not None and check.applies_to(call):
            return self._send_durably(check, call)
        pool = self._pool
        if pool is None:
            return self._execute_script(call, attempt)
        try:
            return pool.execute(call.framed or encode_call(call), seconds=attempt)  # type: ignore[no-any-return]
        except rx.ResponseError as error:
            return self._load_script(error, call)  # type: ignore[no-any-return]

    def _execute_script(self, call: Call[Any], attempt: float | None) -> list[Any]:
        """Execute a script on a cluster, or on a server without an open pool. Load it if it is missing."""
        arguments = (len(call.keys), *call.keys, *call.args)
        try:
            return self._execute("EVALSHA", call.script.sha, *arguments, seconds=attempt)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return self._execute("EVAL", call.script.text, *arguments, seconds=attempt)  # type: ignore[no-any-return]

    def _load_script(self, error: rx.ResponseError, call: Call[Any]) -> Any:
        """Send a missing script with its text and return the reply. Raise every other error."""
        if not isinstance(error, rx.NoScriptError):
            raise explain_redirect(error)
        return self._execute("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)

    def _send_durably(self, check: DurabilityCheck, call: Call[Any]) -> list[Any]:
        script, arguments = call.script, (len(call.keys), *call.keys, *call.args)
        try:
            return self._execute_durably(check, "EVALSHA", script.sha, *arguments)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return self._execute_durably(check, "EVAL", script.text, *arguments)  # type: ignore[no-any-return]

    def _budget(self, within: float | None, attempt: float | None, started: float | None = None) -> RetryBudget:
        return RetryBudget(self.seconds if within is None else within, started, attempt)

    def _pipeline(self, calls: Sequence[Call[Any]], attempt: float | None) -> list[Any]:
        requests = [call.framed or encode_call(call) for call in calls]
        if self._cluster is not None:
            return self._cluster.execute_all([call.keys[0] for call in calls], requests, attempt)
        pool, check = self._pool or self._open_pool(), self._durability_check
        if check is None or not any(map(check.applies_to, calls)):
            return pool.execute_all(requests, attempt)
        self._probe(pool, check)
        replies = pool.execute_all([*requests, *check.requests])
        check.check_replies(replies[len(requests) :])
        return replies[: len(requests)]

    def _send_plain(self, calls: Sequence[PerKeyCall[Any]], attempt: float | None) -> list[Any] | None:
        pool, key = self._pool, calls[0].keys[0]
        if pool is None or self._durability_check is not None or pool.takes_plain is False:
            return None
        if not (pool.takes_plain or pool.learn_plain(key)):
            return None
        request, number = join_plain(calls)
        replies = pool.collect(pool.send([request], attempt), number, attempt)
        if has_errors(replies):
            pool.takes_plain = None
        return replies

    def command(self, *args: Any) -> Any:
        """Execute one plain command, without retries. Meant for PUBLISH and for inspection.

        Raises:
            StoreUnavailable: the connection failed.
            ServerRejected: the server refused the command.
        """
        try:
            return self._execute(*args)
        except FAILURES as error:
            RetryBudget(0).next_delay(error)
            raise

    def probe(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send plain commands together, without retries. Return their replies, and errors as values among them."""
        packed = [pack_command(request) for request in requests]
        try:
            if self._cluster is not None:
                return self._cluster.execute_all([key_of(request) for request in requests], packed)
            return (self._pool or self._open_pool()).execute_all(packed)
        except FAILURES as error:
            return [error] * len(packed)

    @contextmanager
    def waiting(self, channel: bytes) -> Generator[Waiter]:
        """Subscribe to a channel on a dedicated connection and yield a `Waiter`.

        The waiter misses no message that is published from then on.
        """
        waiter = Waiter(self.endpoint, channel)
        warn_in_event_loop()
        try:
            waiter.subscribe()
            yield waiter
        finally:
            waiter.close()

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class Waiter:
    """Waits for a message on a channel. Messages only shorten a poll, so failures of the connection do not raise."""

    def __init__(self, endpoint: Endpoint, channel: bytes) -> None:
        self._endpoint = endpoint
        self._channel = channel
        self._failures = 0
        self._client: Any = None
        self._pubsub: Any = None

    def subscribe(self, seconds: float = SOCKET_TIMEOUT) -> bool:
        """Subscribe on a new connection. Return whether the server confirmed within `seconds`."""
        self._client = sync_client(pick_node(self._endpoint, self._failures), seconds)
        try:
            self._pubsub = self._client.pubsub()
            self._pubsub.subscribe(self._channel)
            self._pubsub.get_message(timeout=min(1.0, seconds))
        except rx.RedisError:
            self._drop()
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Return True when a message arrives, or may have been missed with a lost connection. False after `seconds`."""
        end = monotonic() + seconds
        while (left := end - monotonic()) > 0:
            if self._pubsub is None:
                if self.subscribe(min(left, SOCKET_TIMEOUT)):
                    return True
                time.sleep(max(0.0, min(retry_pause(self._failures), end - monotonic())))
                continue
            try:
                message = self._pubsub.get_message(timeout=left)
            except rx.RedisError:
                self._drop()
            else:
                if message is not None and message["type"] == "message":
                    self._failures = 0
                    return True
        return False

    def _drop(self) -> None:
        self._failures += 1
        self.close()

    def close(self) -> None:
        if self._pubsub is not None:
            self._pubsub.close()
        if self._client is not None:
            self._client.close()
        self._pubsub = self._client = None
