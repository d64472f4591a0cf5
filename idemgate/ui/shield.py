"""Protection of the page: check the headers of each request, and add the security headers of its answer."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from idemgate.errors import InvalidArgument

__all__ = ["CSRF", "LOCAL", "Shield", "check_hosts", "error_answer"]

LOCAL = ("localhost", "127.0.0.1", "::1")
"""The hosts of a page that only this machine reaches."""
CSRF = "x-idemgate"
"""The header of each request that changes something. No form can send it, and no other site may."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types lit-html",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def check_hosts(hosts: Collection[str]) -> frozenset[str]:
    """Return the allowed hosts. Raises InvalidArgument for one with a port or a scheme."""
    found = {host.lower().removeprefix("[").removesuffix("]") for host in hosts}
    for host in found:
        if not host or "/" in host or (_host_of(host) != host and host.count(":") < 2):
            raise InvalidArgument("hosts", host, "not a host", "Pass names without a port, such as 'ops.example.com'")
    return frozenset(found)


def error_answer(status: int, kind: str, message: str) -> JSONResponse:
    """Return an error as JSON."""
    headers = {"Cache-Control": "no-store"} | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
    return JSONResponse({"error": {"kind": kind, "message": message}}, status, headers)


class Shield:
    """Refuses requests for other hosts and those that other sites cause. It adds the headers of security.

    - A host that is not listed: another name may lead to this machine (DNS rebinding).
    - A request from another site, by Sec-Fetch-Site or Origin. Following a link to the page is allowed.
    - A change without the header `X-Idemgate`.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        problem = self._find_problem(scope["method"], Headers(scope=scope))
        await (error_answer(403, "Refused", problem) if problem else self._app)(scope, receive, send_with_headers)

    def _find_problem(self, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if _host_of(host) not in self._hosts:
            return f"the host {host!r:.100} is not allowed. Name it: `idemgate ui --host`, or hosts= of idemgate.ui.app"
        reads = method in ("GET", "HEAD")
        follows = reads and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not follows:
            return "another site sent this request"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return f"the origin {origin!r:.100} is another site"
        if not reads and CSRF not in headers:
            return f"a change needs the header {CSRF}: 1"
        return None


def _host_of(header: str) -> str:
    """Return a host without its port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
