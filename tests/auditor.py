"""The audit after each test."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from idemgate import Gate
from idemgate.errors import StoreError
from idemgate.store.nodes import Server, servers
from idemgate.store.sync import SyncLink
from idemgate.testing import Clock, Report
from idemgate.testing.audit import _Audit

__all__ = ["Auditor"]


class Auditor:
    """`audit` for one server, with connections that stay open: two new ones take longer than the audit after most
    tests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._open: tuple[ExitStack, SyncLink, list[Server]] | None = None

    def __call__(self, namespace: str, clock: Clock | None) -> Report:
        """Audit a namespace. A test may have closed the connections: then new ones are used."""
        if self._open is not None:
            with suppress(StoreError):
                return self._audit(namespace, clock)
            self.close()
        with Gate(self._url) as gate:
            endpoint = gate.context.endpoint
        link, stack = SyncLink(endpoint, 5.0), ExitStack()
        stack.callback(link.close)
        self._open = stack, link, stack.enter_context(servers(endpoint))
        return self._audit(namespace, clock)

    def _audit(self, namespace: str, clock: Clock | None) -> Report:
        assert self._open is not None
        _, link, found = self._open
        pass_ = _Audit(namespace, clock, most=20_000, room=16_777_216)
        findings = tuple(pass_.all(link, found))
        return Report(findings, dict(pass_.counted))

    def close(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None
