"""One POST and what came of it. The transport is used directly: what a client adds, such as redirects, cookies, proxies
of the environment and a log line with the URL, must not happen to a webhook."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import httpx

from idemgate_webhook.guarded import AddressRefused

__all__ = ["Answer", "post"]

CONNECT = 5.0
"""Longest time for one address to take the connection, seconds: there may be another one."""
_FAILURES = (TimeoutError, httpx.TransportError)


@dataclass(slots=True)
class Answer:
    """`status` decides; None: no answer came, and `error` says why. `refused`: nothing was sent."""

    status: int | None = None
    ms: int = 0
    excerpt: str = ""
    error: str = ""
    retry_after: str = ""
    refused: bool = False


async def post(
    transport: httpx.AsyncBaseTransport, url: str, headers: dict[str, str], body: bytes, seconds: float, most: int
) -> Answer:
    """Sends the body once. At most `seconds` in all, however slowly an answer drips in; at most `most` bytes of it are
    read."""
    answer, began = Answer(), perf_counter()
    request = httpx.Request(
        "POST", url, headers=headers, content=body, extensions={"timeout": {"connect": min(CONNECT, seconds)}}
    )
    try:
        async with asyncio.timeout(seconds):
            await _exchange(transport, request, answer, most)
    except _FAILURES as error:
        if answer.status is None:  # else the answer is known, whatever became of its body
            answer.error, answer.refused = _why(error), isinstance(error, AddressRefused)
    answer.ms = round((perf_counter() - began) * 1000)
    return answer


async def _exchange(transport: httpx.AsyncBaseTransport, request: httpx.Request, answer: Answer, most: int) -> None:
    response = await transport.handle_async_request(request)
    answer.status = response.status_code
    answer.retry_after = response.headers.get("retry-after", "")
    try:
        answer.excerpt = await _beginning(response, most)
    finally:
        with suppress(httpx.TransportError):
            await response.aclose()


async def _beginning(response: httpx.Response, most: int) -> str:
    """The first bytes as they came: nothing is decompressed, so nothing can swell."""
    if response.is_closed:  # read already, as those of a mocked transport are
        return response.content[:most].decode(errors="replace")
    found = b""
    if most:
        parts = cast("AsyncGenerator[bytes, None]", response.aiter_raw())
        async with aclosing(parts):  # left early, it would end whenever the collector comes by
            async for part in parts:
                found += part
                if len(found) >= most:
                    break
    return found[:most].decode(errors="replace")


def _why(error: Exception) -> str:
    """Words of ours and of the system only: a protocol error quotes what the other end sent."""
    name = type(error).__name__
    return f"{name}: {error}"[:300] if isinstance(error, httpx.ConnectError) and str(error) else name
