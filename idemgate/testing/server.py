"""A server for tests and the removal of their keys."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from idemgate.core.keys import check_name
from idemgate.store.nodes import servers
from idemgate.store.url import endpoint_from_url

__all__ = ["delete_keys", "temporary_server"]


@contextmanager
def temporary_server() -> Generator[str]:
    """Run an embedded server for this block only and yield its URL. It shares no data with `embedded://`.

    Raises:
        NotConfigured: No server program was found.
        StoreError: The server did not start.
    """
    from idemgate.store.embedded.server import start

    with start() as server:
        yield server.url


def delete_keys(url: str, prefix: str | None) -> None:
    """Delete what tests left in a store, with SCAN.

    Args:
        url: The URL of the store.
        prefix: Delete the keys of all namespaces that are this or begin with this and "-". Streams and lists of the
            program have no namespace, so they stay. None: delete all keys of the database.

    Raises:
        StoreUnavailable: The store cannot be reached.
    """
    with servers(endpoint_from_url(url)) as found:
        for server in found:
            if prefix is None:
                server.command("FLUSHDB")
                continue
            name = check_name(prefix, "prefix").encode()
            for pattern in (b"ig*:{%s:*" % name, b"ig*:{%s-*" % name):
                for batch in server.scan(pattern):
                    server.pipeline([("UNLINK", key) for key in batch])
