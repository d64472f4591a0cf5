"""Blocking access to each server that holds keys, for tools that inspect a whole store."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from idemgate.errors import StoreUnavailable
from idemgate.store.clients import sync_client
from idemgate.store.cluster.nodes import primaries_from_slots
from idemgate.store.endpoint import Endpoint, pick_node
from idemgate.store.retry import FAILURES, RetryBudget

__all__ = ["Server", "servers"]


class Server:
    """One primary. Replies have the types of redis-py: INFO and CONFIG GET return mappings."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name = str(endpoint)
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

    def pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands together and return their replies. Errors of the server are values among them."""
        return self._run_pipeline(commands, transaction=False)

    def transaction(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Execute commands atomically and return their replies, as `pipeline` does. On a cluster their keys share a
        hash tag.
        """
        return self._run_pipeline(commands, transaction=True)

    def _run_pipeline(self, commands: Sequence[tuple[Any, ...]], transaction: bool) -> list[Any]:
        batch = self._client.pipeline(transaction=transaction)
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


@contextmanager
def servers(endpoint: Endpoint) -> Generator[list[Server]]:
    """Yield every primary of a cluster, or the one server.

    Raises:
        StoreUnavailable: no node of the cluster answered.
    """
    connected = [Server(one) for one in _endpoints(endpoint)]
    try:
        yield connected
    finally:
        for server in connected:
            server.__exit__()


def _endpoints(endpoint: Endpoint) -> list[Endpoint]:
    if endpoint.kind != "cluster":
        return [endpoint]
    error: Exception | None = None
    for number in range(len(endpoint.nodes)):
        one = pick_node(endpoint, number)
        try:
            with Server(one) as server:
                return primaries_from_slots(one, server.command("CLUSTER", "SLOTS"))
        except StoreUnavailable as failure:
            error = failure
    raise StoreUnavailable(f"no node of {endpoint} answers", "no") from error
