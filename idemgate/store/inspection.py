"""The servers that hold keys themselves, each by itself, blocking: for who looks at all of a store."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from idemgate.errors import StoreUnavailable
from idemgate.store.clients import sync_client
from idemgate.store.cluster.nodes import owners
from idemgate.store.endpoint import Endpoint, one_node
from idemgate.store.retry import FAILURES, Patience

__all__ = ["Server", "servers"]


class Server:
    """One primary. Replies are as redis-py reads them: INFO and CONFIG GET are mappings."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name = str(endpoint)
        self._client = sync_client(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def command(self, *words: Any) -> Any:
        """One command, sent once; StoreUnavailable, ServerRejected."""
        try:
            return self._client.execute_command(*words)
        except FAILURES as error:
            Patience(0).pause(error)
            raise

    def microseconds(self) -> int:
        """What the server's clock says, since 1970."""
        seconds, rest = self.command("TIME")
        return int(seconds) * 1_000_000 + int(rest)

    def together(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies of commands that travel together; an error of the server is a value among them."""
        return self._piped(commands, transaction=False)

    def at_once(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `together`, and nothing else runs between them; in a cluster their keys share a hash tag."""
        return self._piped(commands, transaction=True)

    def _piped(self, commands: Sequence[tuple[Any, ...]], transaction: bool) -> list[Any]:
        pipeline = self._client.pipeline(transaction=transaction)
        for words in commands:
            pipeline.execute_command(*words)
        try:
            return list(pipeline.execute(raise_on_error=False))
        except FAILURES as error:
            Patience(0).pause(error)
            raise

    def scan(self, pattern: bytes, count: int = 500) -> Iterator[list[bytes]]:
        """Its keys that match, in batches; one that is there all the time comes at least once."""
        cursor = None
        while cursor != 0:
            found, batch = self.command("SCAN", cursor or 0, "MATCH", pattern, "COUNT", count)
            cursor = int(found)
            yield batch


@contextmanager
def servers(endpoint: Endpoint) -> Generator[list[Server]]:
    """Every primary of a cluster, or the one server there is. StoreUnavailable."""
    made = [Server(one) for one in _endpoints(endpoint)]
    try:
        yield made
    finally:
        for server in made:
            server.__exit__()


def _endpoints(endpoint: Endpoint) -> list[Endpoint]:
    if endpoint.kind != "cluster":
        return [endpoint]
    error: Exception | None = None
    for number in range(len(endpoint.nodes)):
        one = one_node(endpoint, number)
        try:
            with Server(one) as server:
                return owners(one, server.command("CLUSTER", "SLOTS"))
        except StoreUnavailable as failure:
            error = failure
    raise StoreUnavailable(f"no node of {endpoint} answers", "no") from error
