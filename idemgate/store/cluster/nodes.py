"""Asynchronous access to each server that holds keys.

Key scans and keyspace events need every node: a cluster does not forward events between nodes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from random import sample
from typing import Any

from idemgate.errors import StoreUnavailable
from idemgate.store.clients import async_client, close_client
from idemgate.store.cluster.topology import node_endpoint, primaries_of
from idemgate.store.endpoint import Endpoint, pick_node
from idemgate.store.pubsub import Subscription
from idemgate.store.retry import FAILURES, RetryBudget
from idemgate.store.shielded import finish_despite_cancel

__all__ = ["Node", "database", "primaries", "primaries_from_slots"]


class Node:
    """One server, for the running event loop only. The caller closes it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name = str(endpoint)
        self.subscription = Subscription(endpoint)
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
    from_url = [pick_node(endpoint, number) for number in range(len(endpoint.nodes))]
    error: Exception | None = None
    for one in [*sample(shuffled := list(known), len(shuffled)), *from_url]:
        node = Node(one)
        try:
            slots = await node.command("CLUSTER", "SLOTS")
        except StoreUnavailable as failure:
            error = failure
            continue
        finally:
            await finish_despite_cancel(node.close())
        return primaries_from_slots(one, slots)
    raise StoreUnavailable(f"no node of {endpoint} answers", "no") from error


def primaries_from_slots(source: Endpoint, slots: list[Any]) -> list[Endpoint]:
    """Return the primaries in a CLUSTER SLOTS reply. `source` is the node that replied."""
    address = source.settings["host"], int(source.settings["port"])
    return [node_endpoint(source, one) for one in primaries_of(address, slots)]


def database(endpoint: Endpoint) -> int:
    """Return the number of the endpoint's database. A cluster has only database 0."""
    return int(endpoint.settings.get("db") or 0)
