"""Access to each server that holds keys: awaiting for subscribers to expiry events, blocking for tools that inspect.

Key scans and keyspace events need every node: a cluster does not forward events between nodes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import sample
from typing import Any, Self

from idemgate.core.waits import finish_despite_cancel
from idemgate.errors import StoreUnavailable
from idemgate.store.clients import async_client, close_client, sync_client
from idemgate.store.cluster.topology import node_endpoint, primaries_of
from idemgate.store.endpoint import Endpoint, pick_node
from idemgate.store.pubsub import Subscription
from idemgate.store.retry import FAILURES, RetryBudget

__all__ = ["Node", "Server", "database", "primaries", "servers"]


class Node:
    """One server, for the running event loop only. The caller closes it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name: str = str(endpoint)
        self.subscription: Subscription = Subscription(endpoint)
        self._client = async_client(endpoint)

    async def command(self, *args: Any) -> Any:
        """Execute one plain command, without retries.

        Raises:
            StoreUnavailable: the connection failed.
            ServerRejected: the server refused the command.
        """
        try:
            return await self._client.execute_command(*args)
        except FAILURES as error:
            RetryBudget(0).next_delay(error)
            raise

    async def scan(self, pattern: str, count: int) -> AsyncGenerator[list[bytes]]:
        """Yield batches of about `count` keys that match. A key that exists throughout the scan is yielded at least
        once.
        """
        cursor = None
        while cursor != 0:
            cursor, keys = await self.command("SCAN", cursor or 0, "MATCH", pattern, "COUNT", count)
            cursor = int(cursor)
            yield keys

    async def is_primary(self) -> bool:
        """Return whether the server reports the role of a primary."""
        return bool((await self.command("ROLE"))[0] == b"master")

    async def close(self) -> None:
        await self.subscription.close()
        await close_client(self._client)


class Server:
    """One primary. Replies have the types of redis-py: INFO and CONFIG GET return mappings."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name: str = str(endpoint)
        self._client = sync_client(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def command(self, *words: Any) -> Any:
        """Execute one command, without retries.

        Raises:
            StoreUnavailable: the connection failed.
            ServerRejected: the server refused the command.
        """
        try:
            return self._client.execute_command(*words)
        except FAILURES as error:
            RetryBudget(0).next_delay(error)
            raise

    def microseconds(self) -> int:
        """Return the server's clock in microseconds since 1970."""
        seconds, rest = self.command("TIME")
        return int(seconds) * 1_000_000 + int(rest)

    def pipeline(self, commands: Sequence[tuple[Any, ...]], *, atomic: bool = False) -> list[Any]:
        """Send commands together and return their replies. Errors of the server are values among them.

        With `atomic` they are a transaction. On a cluster their keys then share a hash tag.
        """
        batch = self._client.pipeline(transaction=atomic)
        for words in commands:
            batch.execute_command(*words)
        try:
            return list(batch.execute(raise_on_error=False))
        except FAILURES as error:
            RetryBudget(0).next_delay(error)
            raise

    def scan(self, pattern: bytes, count: int = 500) -> Iterator[list[bytes]]:
        """Yield batches of the keys that match. A key that exists throughout the scan is yielded at least once."""
        cursor = None
        while cursor != 0:
            position, batch = self.command("SCAN", cursor or 0, "MATCH", pattern, "COUNT", count)
            cursor = int(position)
            yield batch


async def primaries(endpoint: Endpoint, known: Iterable[Endpoint] = ()) -> list[Endpoint]:
    """Return the servers that hold the keys now: every primary of a cluster that has slots, else the store itself.

    Args:
        endpoint: the store.
        known: further nodes to ask, in addition to those of the URL.

    Raises:
        StoreUnavailable: no node answered.
    """
    if endpoint.kind != "cluster":
        return [endpoint]
    error: Exception | None = None
    for one in [*sample(shuffled := list(known), len(shuffled)), *_nodes_of(endpoint)]:
        node = Node(one)
        try:
            slots = await node.command("CLUSTER", "SLOTS")
        except StoreUnavailable as failure:
            error = failure
            continue
        finally:
            await finish_despite_cancel(node.close())
        return _primaries_from_slots(one, slots)
    raise _no_answer(endpoint) from error


@contextmanager
def servers(endpoint: Endpoint) -> Generator[list[Server]]:
    """Yield every primary of a cluster, or the one server.

    Raises:
        StoreUnavailable: no node of the cluster answered.
    """
    with ExitStack() as connected:
        yield [connected.enter_context(Server(one)) for one in _find_primaries(endpoint)]


def _find_primaries(endpoint: Endpoint) -> list[Endpoint]:
    if endpoint.kind != "cluster":
        return [endpoint]
    error: Exception | None = None
    for one in _nodes_of(endpoint):
        try:
            with Server(one) as server:
                return _primaries_from_slots(one, server.command("CLUSTER", "SLOTS"))
        except StoreUnavailable as failure:
            error = failure
    raise _no_answer(endpoint) from error


def _nodes_of(endpoint: Endpoint) -> list[Endpoint]:
    return [pick_node(endpoint, number) for number in range(len(endpoint.nodes))]


def _no_answer(endpoint: Endpoint) -> StoreUnavailable:
    return StoreUnavailable(f"no node of {endpoint} answers", "no")


def _primaries_from_slots(source: Endpoint, slots: list[Any]) -> list[Endpoint]:
    """Return the primaries in a CLUSTER SLOTS reply. `source` is the node that replied."""
    address = source.settings["host"], int(source.settings["port"])
    return [node_endpoint(source, one) for one in primaries_of(address, slots)]


def database(endpoint: Endpoint) -> int:
    """Return the number of the endpoint's database. A cluster has only database 0."""
    return int(endpoint.settings.get("db") or 0)
