"""The servers that hold keys themselves, each by itself: for what is not asked of one key, and for events, which a
cluster does not pass on from node to node."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from random import sample
from typing import Any

from idemgate.errors import StoreUnavailable
from idemgate.store.clients import async_client, close_client
from idemgate.store.cluster.topology import node_of, primaries_of
from idemgate.store.endpoint import Endpoint, one_node
from idemgate.store.pubsub import Ear
from idemgate.store.retry import FAILURES, Patience
from idemgate.store.shielded import to_the_end

__all__ = ["Node", "database", "owners", "primaries"]


class Node:
    """One server, for the running event loop only; the caller closes it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name = str(endpoint)
        self.ear = Ear(endpoint)
        self._client = async_client(endpoint)

    async def command(self, *args: Any) -> Any:
        """One plain command, sent once; StoreUnavailable, ServerRejected."""
        try:
            return await self._client.execute_command(*args)
        except FAILURES as error:
            Patience(0).pause(error)
            raise

    async def scan(self, pattern: str, count: int) -> AsyncGenerator[list[bytes]]:
        """Its keys that match, in batches of about `count`. Each key that is there all the time at least once."""
        cursor = None
        while cursor != 0:
            cursor, keys = await self.command("SCAN", cursor or 0, "MATCH", pattern, "COUNT", count)
            cursor = int(cursor)
            yield keys

    async def is_primary(self) -> bool:
        """As it sees itself."""
        return bool((await self.command("ROLE"))[0] == b"master")

    async def close(self) -> None:
        await self.ear.close()
        await close_client(self._client)


async def primaries(endpoint: Endpoint, known: Iterable[Endpoint] = ()) -> list[Endpoint]:
    """Where the keys are now: of a cluster every primary that has slots, as one of its nodes says; else the store
    itself. StoreUnavailable if no node answers. `known` are nodes that may be asked, beside those of the URL."""
    if endpoint.kind != "cluster":
        return [endpoint]
    named = [one_node(endpoint, number) for number in range(len(endpoint.nodes))]
    error: Exception | None = None
    for one in [*sample(seen := list(known), len(seen)), *named]:
        node = Node(one)
        try:
            slots = await node.command("CLUSTER", "SLOTS")
        except StoreUnavailable as failure:
            error = failure
            continue
        finally:
            await to_the_end(node.close())
        return owners(one, slots)
    raise StoreUnavailable(f"no node of {endpoint} answers", "no") from error


def owners(asked: Endpoint, slots: list[Any]) -> list[Endpoint]:
    """The primaries in the answer to CLUSTER SLOTS."""
    address = asked.settings["host"], int(asked.settings["port"])
    return [node_of(asked, one) for one in primaries_of(address, slots)]


def database(endpoint: Endpoint) -> int:
    """The number of its database; a cluster has one."""
    return int(endpoint.settings.get("db") or 0)
