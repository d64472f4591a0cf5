"""An httpx transport that connects to checked addresses only."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpx

from idemgate_webhook.reach import Reach

__all__ = ["AddressRefused", "Guarded", "Resolve"]

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host and a port to addresses; OSError if there are none."""


class AddressRefused(httpx.ConnectError):
    """The host has no address that may be connected to. Nothing was sent."""


class Guarded(httpx.AsyncBaseTransport):
    """Resolves a host once, checks what came out, and connects to just that: a second answer of the name server
    cannot change where the request goes. The request still names the host, in `Host`, in TLS's server name, and in
    the certificate that is asked for. Redirects are the client's to follow, and come here again if it does.

    - `allow`: networks that may be reached beside the public ones; see `Reach`.
    - `tls`: how certificates are checked; None: as httpx does.
    - `resolve`: another resolver than the system's.

    Every request has a connection of its own. A pool knows connections by address, and would hand one that was
    proven to be of one host to another host of the same address. So there is also nothing to close.
    """

    def __init__(
        self, allow: Iterable[str] = (), *, tls: ssl.SSLContext | None = None, resolve: Resolve | None = None
    ) -> None:
        self.reach: Reach = Reach(allow)
        self._tls = tls
        self._resolve = resolve or resolved

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises AddressRefused; all else as every transport of httpx."""
        failure: httpx.TransportError = httpx.ConnectError("the name has no address", request=request)
        for address in await self._addresses(request):
            try:
                return await self._send(request, address)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error  # nothing was sent: its next address may answer
        raise failure

    async def _addresses(self, request: httpx.Request) -> list[str]:
        url = request.url
        host = url.raw_host.decode("ascii")
        try:
            found = await self._resolve(host, url.port or (443 if url.scheme == "https" else 80))
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"{host} was not resolved: {error}", request=request) from None
        refusals = {address: self.reach.refuses(address) for address in found}
        if refusals and all(refusals.values()):
            raise AddressRefused(f"{host}: {next(iter(refusals.values()))}", request=request)
        return [address for address, refusal in refusals.items() if refusal is None]

    async def _send(self, request: httpx.Request, address: str) -> httpx.Response:
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode("ascii")},
        )
        alone = httpx.Limits(max_connections=1, max_keepalive_connections=0)  # closed with its response
        tls = await self._trust() if pinned.url.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        connection = httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=alone)
        return await connection.handle_async_request(pinned)

    async def _trust(self) -> ssl.SSLContext:
        """Reads all certificates, which takes a while: not before they are needed, and not in the event loop."""
        if self._tls is None:
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        return self._tls


async def resolved(host: str, port: int) -> list[str]:
    """What the system's resolver says."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
