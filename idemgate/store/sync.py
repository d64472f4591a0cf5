"""The blocking link."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.calls import OF_ONE_KEY, Batch, Call, Each, Moved, Unfinished
from idemgate.core.forks import freed_at_fork
from idemgate.errors import StoreError
from idemgate.store.clients import CONNECTIONS, sync_client
from idemgate.store.cluster.sync import ClusterWires
from idemgate.store.cluster.topology import key_of
from idemgate.store.connection import Wires
from idemgate.store.durability import Durability
from idemgate.store.endpoint import Endpoint, one_node
from idemgate.store.replication import Copies, copies_of
from idemgate.store.resp import pack, request
from idemgate.store.retry import FAILURES, Patience, unheard

__all__ = ["SyncLink", "Waiter"]

T = TypeVar("T")


class SyncLink:
    """Carries calls and blocks. Safe to share between threads; a forked child makes its own connections."""

    def __init__(self, endpoint: Endpoint, seconds: float, durability: Durability | None = None) -> None:
        self.endpoint = endpoint
        self.seconds = seconds
        self._copies = copies_of(durability, endpoint, seconds)
        self._made: Any = None
        self._wires: Wires | None = None
        self._cluster = ClusterWires(endpoint, seconds) if endpoint.kind == "cluster" else None
        self._making = freed_at_fork(self, "_making")

    @property
    def _client(self) -> Any:
        if self._made is None:
            self._made = sync_client(self.endpoint, self.seconds)
        return self._made

    def _ask(self, *words: Any, seconds: float | None = None) -> Any:
        """The reply to one command, waited for at most `seconds`; redis-py's errors are raised."""
        if self._cluster is not None:
            return self._cluster.ask(key_of(words), pack(words), seconds)
        wires = self._wires or self._wired()
        try:
            return wires.ask(pack(words), seconds=seconds)
        except rx.ResponseError as error:
            self._suspect(wires, error)
            raise

    def _suspect(self, wires: Wires, error: Exception) -> None:
        if self.endpoint.kind == "sentinel" and "READONLY" in str(error):
            wires.abandon()  # it was the master; the next connection asks the sentinels who is now

    def _ask_durably(self, copies: Copies, *words: Any) -> Any:
        """As `_ask`; Short when the write is on fewer copies than asked for."""
        wires = self._wires or self._wired()
        self._try(wires, copies)
        reply, *behind = wires.ask_all([pack(words), *copies.requests])
        if isinstance(reply, Exception):
            self._suspect(wires, reply)
            raise reply
        copies.check(behind)
        return reply

    def _try(self, wires: Wires, copies: Copies) -> None:
        """Asks, once, whether the server can do what is asked for at all: ServerRejected if not."""
        for asked in copies.trial:
            (reply,) = wires.ask_all([asked])
            try:
                copies.tried(asked, reply)
            except rx.ResponseError as error:
                self._suspect(wires, error)
                raise

    def _wired(self) -> Wires:
        with self._making:  # two threads must not make two of them
            if self._wires is None:
                pool = self._client.connection_pool
                self._wires = Wires(pool, min(self.seconds, SOCKET_TIMEOUT), CONNECTIONS)
            return self._wires

    def run(self, call: Call[T], within: float | None = None, attempt: float | None = None) -> T:
        """The answer of one call; sent again, with the same tokens, for `within` seconds (default: the gate's
        time-out). One try waits at most `attempt` seconds for its reply (None: as long as a connection allows); not
        with `durability=`, whose reply comes behind the copies.

        Raises StoreUnavailable (with `executed`), ServerRejected, UnexpectedData.
        """
        started, wires = monotonic(), self._wires
        try:
            if wires is None or attempt is not None or self._copies is not None:
                return call.answer(self._send(call, attempt))
            try:  # as `_send`, without calling it: this is what a guarded call waits for
                reply = wires.ask(call.framed or request(call), started)
            except rx.ResponseError as error:
                reply = self._refused(wires, error, call)
            return call.answer(reply)
        except (Moved, Unfinished):  # asked again, with the same token, it says so again
            return self._insist(call, Patience(self.seconds if within is None else within, started, attempt))
        except FAILURES as error:
            patience = Patience(self.seconds if within is None else within, started, attempt)
            time.sleep(patience.pause(error))
        return self._insist(call, patience)

    def _insist(self, call: Call[T], patience: Patience, hops: int = 0) -> T:
        while True:
            try:
                reply = self._send(call, patience.attempt)
            except FAILURES as error:
                time.sleep(patience.pause(error))
            else:
                return self._answered(call, reply, patience, hops)

    def _answered(self, call: Call[T], reply: list[Any], patience: Patience, hops: int = 0) -> T:
        """What the reply means; where its slot has moved, what is answered there; where a part is left, with that."""
        try:
            return call.answer(reply)
        except Unfinished as found:
            rest = found.rest
            return rest.join([self._insist(one, patience.anew()) for one in rest.calls])  # type: ignore[no-any-return]
        except Moved as moved:
            elsewhere, by = call.elsewhere, moved.by
        assert elsewhere is not None, "or it is not moved"
        time.sleep(patience.hop(hops))
        there = elsewhere.there(self._insist(elsewhere.ask(), patience), by)
        return there.join([self._insist(one, patience, hops + 1) for one in there.calls])  # type: ignore[no-any-return]

    def run_all(self, batch: Batch[T], within: float | None = None) -> T:
        """The answer of a batch; `within` is for all of it. Its calls travel together, one round trip; on a cluster one
        of each node, all at the same time."""
        return batch.join(self._run_together(batch.calls, Patience(self.seconds if within is None else within)))

    def run_each(self, calls: Sequence[Each[Any]], within: float | None = None) -> list[Any]:
        """As `run_all`, the answer of each key of the calls, or the StoreError that it came to, which is raised to
        nobody.

        Where the store cannot be asked at all, what has no reply by then is not asked again: it came to the same.
        """
        patience, down, outcomes = Patience(self.seconds if within is None else within), None, list[Any]()
        try:
            replies = self._sent_together(calls, patience)
        except StoreError as error:
            return [error for call in calls for _ in call.keys]
        for call, reply in zip(calls, replies, strict=True):
            if down is not None and unheard(reply):
                outcomes += [down] * len(call.keys)
                continue
            try:
                answers: list[Any] = self._told(call, reply, patience)
                outcomes += answers
            except StoreError as error:
                outcomes += [error] * len(call.keys)
                down = down if isinstance(error, OF_ONE_KEY) else error
        return outcomes

    def _run_together(self, calls: Sequence[Call[Any]], patience: Patience) -> list[Any]:
        replies, answers = self._sent_together(calls, patience), list[Any]()
        for call, reply in zip(calls, replies, strict=True):
            answers.append(self._told(call, reply, patience))
            patience.partly()
        return answers

    def _sent_together(self, calls: Sequence[Call[Any]], patience: Patience) -> Sequence[Any]:
        replies: Sequence[Any] = [None] * len(calls)
        if len(calls) > 1:
            try:
                replies = self._send_together(calls)
                if not all(map(unheard, replies)):
                    patience.partly()
                patience.mind(replies)
            except FAILURES as error:
                time.sleep(patience.pause(error))
        return replies

    def _told(self, call: Call[T], reply: Any, patience: Patience) -> T:
        """What has no reply, or an error for one, goes again by itself, with the same tokens."""
        return self._insist(call, patience) if unheard(reply) else self._answered(call, reply, patience)

    def _send(self, call: Call[Any], attempt: float | None = None) -> list[Any]:
        copies = self._copies
        if copies is not None and copies.concern(call):
            return self._send_durably(copies, call)
        wires = self._wires
        if wires is None:
            return self._ask_node(call, attempt)
        try:
            return wires.ask(call.framed or request(call), seconds=attempt)  # type: ignore[no-any-return]
        except rx.ResponseError as error:
            return self._refused(wires, error, call)  # type: ignore[no-any-return]

    def _ask_node(self, call: Call[Any], attempt: float | None) -> list[Any]:
        """Of a cluster, or of a server that was not asked yet."""
        words = (len(call.keys), *call.keys, *call.args)
        try:
            return self._ask("EVALSHA", call.script.sha, *words, seconds=attempt)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return self._ask("EVAL", call.script.text, *words, seconds=attempt)  # type: ignore[no-any-return]

    def _refused(self, wires: Wires, error: rx.ResponseError, call: Call[Any]) -> Any:
        """The reply of a server that has the script from now on; whatever else it refused is raised."""
        if not isinstance(error, rx.NoScriptError):
            self._suspect(wires, error)
            raise error
        return self._ask("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)

    def _send_durably(self, copies: Copies, call: Call[Any]) -> list[Any]:
        script, words = call.script, (len(call.keys), *call.keys, *call.args)
        try:
            return self._ask_durably(copies, "EVALSHA", script.sha, *words)  # type: ignore[no-any-return]
        except rx.NoScriptError:
            return self._ask_durably(copies, "EVAL", script.text, *words)  # type: ignore[no-any-return]

    def _send_together(self, calls: Sequence[Call[Any]]) -> list[Any]:
        requests = [call.framed or request(call) for call in calls]
        if self._cluster is not None:
            return self._cluster.ask_all([call.keys[0] for call in calls], requests)
        wires, copies = self._wires or self._wired(), self._copies
        if copies is None or not any(map(copies.concern, calls)):
            return wires.ask_all(requests)
        self._try(wires, copies)
        replies = wires.ask_all([*requests, *copies.requests])
        copies.check(replies[len(requests) :])
        return replies[: len(requests)]

    def command(self, *args: Any) -> Any:
        """One plain command, sent once. For publishing and for looking at the server; raises StoreUnavailable,
        ServerRejected."""
        try:
            return self._ask(*args)
        except FAILURES as error:
            Patience(0).pause(error)
            raise

    @contextmanager
    def waiting(self, channel: bytes) -> Generator[Waiter]:
        """Subscribes to a channel on a connection of its own; what is published from then on is not missed by
        `Waiter.wait`."""
        client = sync_client(one_node(self.endpoint, 0))
        pubsub = client.pubsub()
        waiter = Waiter(pubsub)
        try:
            waiter.subscribe(channel)
            yield waiter
        finally:
            pubsub.close()
            client.close()

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        if self._wires is not None:
            self._wires.close()
            self._wires = None
        if self._made is not None:
            self._made.close()
            self._made = None


class Waiter:
    """Waits for a wake-up. Where the connection fails it waits out the time: wake-ups only shorten a poll."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub: Any = pubsub

    def subscribe(self, channel: bytes) -> None:
        try:
            self._pubsub.subscribe(channel)
            self._pubsub.get_message(timeout=1.0)
        except rx.RedisError:
            self._pubsub = None

    def wait(self, seconds: float) -> bool:
        """True if woken, False after `seconds`."""
        end = monotonic() + seconds
        while self._pubsub is not None and (left := end - monotonic()) > 0:
            try:
                message = self._pubsub.get_message(timeout=left)
            except rx.RedisError:
                self._pubsub = None
                break
            if message is not None and message["type"] == "message":
                return True
        time.sleep(max(0.0, end - monotonic()))
        return False
